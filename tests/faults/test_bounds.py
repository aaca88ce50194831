"""Configurations and folders that ask too much: the server refuses them immediately with an error text, and other
models are not affected."""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from support.infer_inputs import infer_input
from support.load import ConstantLoad
from support.models import add_constant, answering, drop
from support.repository_index import models_of
from support.server import RocserveProcess, Start
from support.waiting import PATIENCE_SECONDS, wait_until
from tritonclient.utils import InferenceServerException

SETTLE = "--repository-settle-secs=0.1"
MODEL = """
platform: "onnx_onnxv1"
max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] }
"""
PYTHON = MODEL.replace('platform: "onnx_onnxv1"', 'backend: "python"')
SCRIPT = answering("X", "Y", "x + 1")
MEMORY = 200 << 20
"""Bytes by which the server may grow during these tests."""


def refusal(server: RocserveProcess, model: str, config: dict[str, object]) -> str:
    """The error of a load with this configuration, and the index's reason."""
    client = server.client()
    with pytest.raises(InferenceServerException) as caught:
        client.load_model(model, config=json.dumps(config))
    client.close()
    return f"{caught.value.message()} {models_of(server)[model][1]}"


def test_instances_without_number_are_refused_and_nobody_notices(serve, repository: Path) -> None:
    drop(repository, "m", add_constant(1.0), MODEL)
    drop(repository, "python", SCRIPT, PYTHON)
    server = serve(repository, "--model-control-mode=explicit", "--load-model=*", "--max-model-instances=3")
    before = server.resident_bytes()
    groups = {
        "many": [{"count": 2_000_000_000, "kind": "KIND_CPU"}],
        "sums": [{"count": 2, "kind": "KIND_CPU"}, {"count": 2, "kind": "KIND_CPU"}],
    }
    tensors = {
        "max_batch_size": 8,
        "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [2]}],
        "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [2]}],
    }
    with ConstantLoad(server.address, "m", {1.0}, threads=2) as load:
        for model, head in (("m", {"platform": "onnx_onnxv1"}), ("python", {"backend": "python"})):
            for group, asked in zip(groups.values(), (2_000_000_000, 4), strict=True):
                text = refusal(server, model, {**head, **tensors, "instance_group": group})
                assert f"ask for {asked} instances on the CPU, at most 3 are possible here" in text
                assert "--max-model-instances" in text
                assert is_live(server)
    assert load.failures == []
    assert load.wrong == []
    assert server.resident_bytes() - before < MEMORY
    assert len(server.workers()) == 2


def is_live(server: RocserveProcess) -> bool:
    with urllib.request.urlopen(f"http://{server.http_address}/v2/health/live", timeout=PATIENCE_SECONDS) as answer:
        return answer.status == 200


SCHEDULERS = {
    "priorities": "dynamic_batching { priority_levels: 18446744073709551615"
    " default_priority_level: 18446744073709551615 }",
    "oldest": "sequence_batching { oldest { max_candidate_sequences: 2147483647 } }",
    "direct": "sequence_batching { direct { } }",
}


STRANGE = {
    b"caf\xe9": r"caf\xe9",
    b"two\nlines": r"two\nlines",
    b"\x1b[31mred\x07": r"\x1b[31mred\x07",
}
LONG = "long" * 63
ODD_BUT_GOOD = ("a b", "dots..", "back\\slash", "quote'\"", "Модель", LONG)


@pytest.fixture(scope="module")
def server(start: Start, tmp_path_factory: pytest.TempPathFactory) -> RocserveProcess:
    """A server that finds all kinds of odd folders at its start."""
    repository = tmp_path_factory.mktemp("odd") / "repository"
    config = PYTHON.replace("max_batch_size: 8", "max_batch_size: 2147483647")
    for name, scheduler in SCHEDULERS.items():
        drop(repository, name, SCRIPT, config + scheduler)
    full = drop(repository, "full", add_constant(1.0), MODEL)
    for number in range(300):
        (full / "1" / f"{number}.txt").touch()
    many = drop(repository, "many", add_constant(1.0), MODEL + "version_policy { all { } }")
    for number in range(2, 6):
        (many / str(number)).mkdir()
        os.link(many / "1" / "model.onnx", many / str(number) / "model.onnx")
    for name in (*map(os.fsdecode, STRANGE), *ODD_BUT_GOOD):
        drop(repository, name, add_constant(1.0), MODEL)
    good = drop(repository, "good", add_constant(1.0), MODEL)
    (good / "1" / os.fsdecode(b"caf\xe9\n.txt")).touch()
    (good / os.fsdecode(b"\xff")).mkdir()
    lacking = repository / "lacking"
    (lacking / "1").mkdir(parents=True)
    (lacking / "config.pbtxt").write_text(MODEL)
    (lacking / "1" / os.fsdecode(b"model\xe9.onnx")).touch()
    limits = ("--max-folder-entries=200", "--max-model-versions=4")
    return start(repository, SETTLE, *limits, "--strict-readiness=false")


def test_what_costs_only_as_it_is_used_is_served(server: RocserveProcess) -> None:
    assert [models_of(server)[name] for name in SCHEDULERS] == [("READY", "")] * len(SCHEDULERS)
    before = server.resident_bytes()
    client = server.client()
    for name, scheduler in SCHEDULERS.items():
        for number in range(1, 20):
            answer = client.infer(
                name,
                [tensor()],
                priority=2**64 - number,
                sequence_id=number if "sequence" in scheduler else 0,
                sequence_start=True,
            )
            assert answer.as_numpy("Y").tolist() == [[1.0, 1.0]]
    assert server.resident_bytes() - before < MEMORY


def tensor() -> triton.InferInput:
    return infer_input("X", np.zeros((1, 2), np.float32))


def test_a_folder_with_too_many_files_and_a_model_with_too_many_versions(server: RocserveProcess) -> None:
    rows = models_of(server)
    assert rows["good"] == ("READY", "")
    assert "holds more than 200 files and folders" in rows["full"][1]
    assert "--max-folder-entries" in rows["full"][1]
    assert "serves 5 versions, at most 4 are possible" in rows["many"][1]
    assert "--max-model-versions" in rows["many"][1]


def test_names_that_cannot_be_printed_are_refused_by_themselves(server: RocserveProcess) -> None:
    repository = server.repositories[0]
    rows = models_of(server)
    for shown in STRANGE.values():
        assert rows[shown][0] == "UNAVAILABLE"
        assert "rename the folder" in rows[shown][1]
        assert f"the name of the folder '{shown}'" in server.log_text
    for name in (*ODD_BUT_GOOD, "good"):
        assert rows[name] == ("READY", ""), name
    assert r"model\udce9.onnx" in rows["lacking"][1]
    # A later one is served too, and unloaded again.
    late = drop(repository, os.fsdecode(b"late\xff"), add_constant(1.0), MODEL)
    wait_until(lambda: r"late\xff" in models_of(server), "the late folder")
    late.rename(repository / "late")
    wait_until(lambda: models_of(server).get("late") == ("READY", ""), "its better name")
    client = server.client()
    for name in (*ODD_BUT_GOOD, "good", "late"):
        assert client.infer(name, [tensor()]).as_numpy("Y").tolist() == [[1.0, 1.0]]


def test_many_folders_that_lack_their_files_keep_no_other_waiting(serve, repository: Path) -> None:
    for number in range(200):
        drop(repository, f"broken{number}", None, MODEL)
    server = serve(repository, SETTLE, "--strict-readiness=false")
    states = [state for state, _ in models_of(server).values()]
    assert states == ["UNAVAILABLE"] * 200
    drop(repository, "good", add_constant(1.0), MODEL)
    wait_until(lambda: models_of(server).get("good") == ("READY", ""), "the good model among the broken ones")
    # The files arrive at last: a change, which waits for no retry.
    (repository / "broken199" / "1" / "model.onnx").write_bytes(add_constant(1.0))
    wait_until(lambda: models_of(server)["broken199"] == ("READY", ""), "the model whose file was brought")
