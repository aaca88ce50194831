"""Models with a check.npz beside them, on a real server: those that answer otherwise are not served."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.infer_inputs import infer_input
from support.metrics import FLAGS, port_of, scrape
from support.models import ADD_CONSTANT_CONFIG, add_constant, answering, drop
from support.repository_index import index_of, models_of
from support.server import RocserveProcess
from support.waiting import wait_until

from rocserve.load_check.recorded import RecordedAnswers, write_recorded
from rocserve_client import Client

pytestmark = pytest.mark.long

X = np.float32([[1, 2], [3, 4]])
PYTHON_CONFIG = """
backend: "python"
max_batch_size: 4
input { name: "X" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] }
"""
DECOUPLED = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for row in pb_utils.get_input_tensor_by_name(request, "X").as_numpy():
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", row[None])]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
TWICE = """
platform: "ensemble"
max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] }
ensemble_scheduling {
  step [
    { model_name: "adds" model_version: -1 input_map { key: "X" value: "X" } output_map { key: "Y" value: "between" } },
    { model_name: "adds" model_version: -1 input_map { key: "X" value: "between" } output_map { key: "Y" value: "Y" } }
  ]
}
"""
SEQUENCE = f"""
{PYTHON_CONFIG}
sequence_batching {{
  control_input {{ name: "START" control {{ kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] }} }}
}}
"""
SAMPLES = Path(__file__).parents[2] / "model_repository"
DIGITS = Path(__file__).parents[1] / "data" / "digits"
SLOW = """
while not os.path.exists(%r):
    time.sleep(0.01)
"""


def record(folder: Path, y: Any, **more: Any) -> None:
    """Write recorded answers as a copy does that is complete at once."""
    unfinished = folder / "check.tmp"
    with unfinished.open("wb") as file:
        np.savez(file, **{"input.X": X, "output.Y": np.float32(y), **more})
    unfinished.replace(folder / "check.npz")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("recorded") / "models"
    for name, y in (("adds", X + 1), ("adds_wrongly", X + 1.5)):
        drop(repository, name, add_constant(1), ADD_CONSTANT_CONFIG)
        record(repository / name / "1", y)
    drop(repository, "tolerated", add_constant(1), ADD_CONSTANT_CONFIG)
    record(repository / "tolerated" / "1", X + 1.5, tolerance=0.2)
    for name, y in (("twice", X + 2), ("twice_wrongly", X + 1)):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(TWICE)
        # In the model's folder, for all versions.
        record(repository / name, y)
    for name, y in (("python", X * 2), ("python_wrongly", X)):
        drop(repository, name, answering("X", "Y", "x * 2"), PYTHON_CONFIG)
        record(repository / name / "1", y)
    drop(repository, "decoupled", DECOUPLED, f"{PYTHON_CONFIG} model_transaction_policy {{ decoupled: true }}")
    record(repository / "decoupled" / "1", X)
    start = 'pb_utils.get_input_tensor_by_name(request, "START").as_numpy()'
    drop(repository, "sequence", answering("X", "Y", f"x + {start}"), SEQUENCE)
    record(repository / "sequence" / "1", X)
    for name in ("digits", "digits_preprocess", "digits_classifier"):
        shutil.copytree(SAMPLES / name, repository / name)
    drop(repository, "damaged", add_constant(1), ADD_CONSTANT_CONFIG)
    (repository / "damaged" / "1" / "check.npz").write_bytes(b"not an archive")
    off = f'{ADD_CONSTANT_CONFIG} parameters {{ key: "load_check" value {{ string_value: "off" }} }}'
    drop(repository, "unchecked", add_constant(1), off)
    record(repository / "unchecked" / "1", X)
    drop(repository, "slow", answering("X", "Y", first=SLOW % str(repository.parent / "gate")), PYTHON_CONFIG)
    record(repository / "slow" / "1", X)
    return repository


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[RocserveProcess]:
    with RocserveProcess([repository], *FLAGS, log=repository.parent / "server.log") as running:
        wait_until(lambda: sum(state == "READY" for state, _ in models_of(running).values()) >= 6)
        yield running


def properties(server: RocserveProcess, model: str) -> Mapping[str, str]:
    with Client(server.address) as client:
        return client.model_metadata(model).properties


def refusal(server: RocserveProcess, model: str) -> str:
    """Wait until the model is unavailable; return the reason, read together with the state: the server may retry."""
    seen: list[tuple[str, str]] = []

    def is_refused() -> bool:
        seen.append(models_of(server).get(model, ("", "")))
        return seen[-1][0] == "UNAVAILABLE"

    wait_until(is_refused, f"the refusal of '{model}'")
    return seen[-1][1]


def answer(server: RocserveProcess, model: str) -> list[list[float]]:
    with server.client() as client:
        found = client.infer(model, [infer_input("X", X)]).as_numpy("Y")
        assert found is not None
        return found.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("adds", "recorded answers are equal"),
        ("tolerated", "recorded answers agree, largest difference 0.091"),
        ("twice", "recorded answers are equal"),
        ("python", "recorded answers are equal"),
        ("decoupled", "recorded answers are equal"),
        ("sequence", "recorded answers are equal"),
    ],
)
def test_models_that_answer_as_recorded_are_served(server: RocserveProcess, model: str, says: str) -> None:
    wait_until(lambda: models_of(server).get(model) == ("READY", ""))
    assert properties(server, model)["load_check"].endswith(says)

    def lines() -> list[str]:
        return [line for line in server.log_text.splitlines() if f"{model} 1: " in line and says in line]

    wait_until(lines, "the line in the log")
    (line,) = lines()
    assert line.endswith(" s")


@pytest.mark.parametrize(
    ("model", "differs", "given", "recorded"),
    [
        ("adds_wrongly", "0.091", 2, 2.5),
        ("twice_wrongly", "0.17", 3, 2),
        ("python_wrongly", "0.5", 8, 4),
    ],
)
def test_models_that_answer_otherwise_are_not(
    server: RocserveProcess, model: str, differs: str, given: float, recorded: float
) -> None:
    place = [1, 1] if model == "python_wrongly" else [0, 0]
    text = (
        f"it does not answer as check.npz says: output 'Y' differs by {differs} of its largest value, the tolerance is"
        f" 0.001: at {place} the model gives {given}, recorded is {recorded}"
    )
    assert refusal(server, model).startswith(f"Invalid argument: {text}")
    labels = f'{{kind="recorded answers",model="{model}",version="1"}}'
    wait_until(
        lambda: float(scrape(port_of(server)).get(f"rocserve_load_check_failures_total{labels}", 0)) >= 1, "the count"
    )


def test_a_damaged_file_is_no_reason_to_serve_unchecked(server: RocserveProcess) -> None:
    assert "check.npz: it is not an archive of numpy's arrays (numpy.savez)" in refusal(server, "damaged")


@pytest.mark.parametrize("model", ["digits", "digits_preprocess"])
def test_what_a_client_got_is_an_answer_to_record(server: RocserveProcess, repository: Path, model: str) -> None:
    """Pictures as bytes, texts, and a pipeline of rocAL's."""
    wait_until(lambda: models_of(server).get(model) == ("READY", ""))
    pictures = np.array([[path.read_bytes()] for path in sorted(DIGITS.iterdir())[:3]], object)
    with Client(server.address) as client:
        outputs = client.infer(model, {"ENCODED": pictures}).outputs
    write_recorded(repository / model / "1" / "check.npz", RecordedAnswers({"ENCODED": pictures}, outputs))
    wait_until(lambda: "recorded answers are equal" in properties(server, model).get("load_check", ""))


def test_a_model_may_be_served_unchecked(server: RocserveProcess) -> None:
    wait_until(lambda: models_of(server).get("unchecked") == ("READY", ""))
    assert "load_check" not in properties(server, "unchecked")
    assert answer(server, "unchecked") == (X + 1).tolist()


def test_a_check_that_runs_is_seen(server: RocserveProcess, repository: Path) -> None:
    wait_until(lambda: models_of(server).get("slow") == ("CHECKING", "comparing its answer with check.npz"))
    with server.client() as client:
        assert not client.is_model_ready("slow")
    # Beside the repository: a change of the model's own folder would load it again.
    (repository.parent / "gate").touch()
    wait_until(lambda: models_of(server)["slow"] == ("READY", ""))


def test_a_version_that_answers_otherwise_does_not_take_the_place_of_another(
    server: RocserveProcess, repository: Path
) -> None:
    folder = repository / "adds" / "1"
    new = folder / "model.tmp"
    new.write_bytes(add_constant(5))
    new.replace(folder / "model.onnx")
    wait_until(lambda: "newer content failed to load" in index_of(server, "adds")["1"][1])
    state, reason = index_of(server, "adds")["1"]
    assert state == "READY"
    assert "at [0, 0] the model gives 6, recorded is 2" in reason
    assert answer(server, "adds") == (X + 1).tolist()
    # The file itself is a part of the version: to change it loads the model again.
    record(folder, X + 5)
    wait_until(lambda: index_of(server, "adds")["1"] == ("READY", ""))
    assert answer(server, "adds") == (X + 5).tolist()
