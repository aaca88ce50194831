"""Models written for Triton's Python backend, served by the real server to Triton's own client."""

from __future__ import annotations

import json
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton
from support.infer_inputs import infer_input
from support.models import drop
from support.python_models import MODELS
from support.server import RocserveProcess, Start
from support.waiting import PATIENCE_SECONDS, wait_until
from tritonclient.utils import InferenceServerException

SAMPLE_REPOSITORY = Path(__file__).parents[2] / "model_repository"
DIGITS = sorted((Path(__file__).parents[1] / "data" / "digits").glob("*.jpg"))


@pytest.fixture(scope="module")
def server(start: Start, tmp_path_factory: pytest.TempPathFactory) -> RocserveProcess:
    folder = tmp_path_factory.mktemp("python-models")
    repository = folder / "repository"
    shutil.copytree(MODELS, repository)
    _make_environment(folder / "environment")
    config = repository / "own_environment" / "config.pbtxt"
    config.write_text(config.read_text().replace("$$TRITON_MODEL_DIRECTORY", str(folder)))
    for name in ("digits", "digits_classifier", "digits_preprocess"):
        shutil.copytree(SAMPLE_REPOSITORY / name, repository / name)
    return start(repository)


def _make_environment(folder: Path) -> None:
    """An environment with one extra module, and numpy from the tests' packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (packages / "numpy_from_outside.pth").write_text(f"{Path(np.__file__).parents[1]}\n")
    (packages / "only_in_this_environment.py").write_text('GREETING = "hello from in here"\n')


def text(name: str, *words: bytes | str) -> triton.InferInput:
    return infer_input(name, np.array([[word] for word in words], dtype=object))


def one(name: str, value: int, datatype: str = "INT32") -> triton.InferInput:
    return infer_input(name, np.array([value], {"INT32": np.int32, "BOOL": np.bool_}[datatype]))


class Stream:
    """The responses of a streaming client."""

    def __init__(self, server: RocserveProcess) -> None:
        self.client = server.client()
        self._answers: queue.Queue = queue.Queue()
        self.client.start_stream(lambda result, error: self._answers.put((result, error)))

    def infer(self, model: str, *inputs: triton.InferInput) -> tuple[list, list[str]]:
        """The responses with outputs, and the errors, up to the final flag."""
        self.client.async_stream_infer(model, list(inputs), enable_empty_final_response=True)
        results, errors = [], []
        while True:
            result, error = self._answers.get(timeout=PATIENCE_SECONDS)
            if error is not None:
                errors.append(error.message())
                continue
            response = result.get_response()
            if response.outputs:
                results.append(result)
            if response.parameters["triton_final_response"].bool_param:
                return results, errors

    def close(self) -> None:
        self.client.stop_stream()
        self.client.close()


@pytest.fixture
def stream(server: RocserveProcess) -> Iterator[Stream]:
    opened = Stream(server)
    yield opened
    opened.close()


def test_add_sub_and_texts(server):
    client = server.client()
    left, right = np.arange(8, dtype=np.float32).reshape(2, 4), np.full((2, 4), 2, np.float32)
    result = client.infer("add_sub", [infer_input("INPUT0", left), infer_input("INPUT1", right)])
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), left + right)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), left - right)
    result = client.infer("words", [text("TEXT", "grüße", b"")])
    assert result.as_numpy("SHOUTED").tolist() == [["GRÜSSE!".encode()], [b"!"]]
    assert result.as_numpy("LENGTHS").tolist() == [[7], [0]]
    wait_until(lambda: "2 texts" in server.log_text, "the model's line in the log")


def test_calls_of_models_and_of_an_ensemble(server):
    images = [path.read_bytes() for path in DIGITS[:4]]
    client = server.client()
    read = client.infer("digit_reader", [text("ENCODED", *images)])
    asked = client.infer("digits", [text("ENCODED", *images)]).as_numpy("LABEL")
    assert asked.shape == (4, 1)
    assert read.as_numpy("CHAINED").tolist() == read.as_numpy("TOGETHER").tolist() == asked.tolist()


def test_calls_side_by_side(server):
    left, right = np.arange(40, dtype=np.float32).reshape(10, 4), np.ones((10, 4), np.float32)
    result = server.client().infer("fan_out", [infer_input("LEFT", left), infer_input("RIGHT", right)])
    np.testing.assert_array_equal(result.as_numpy("SUMS"), left + right)
    assert result.as_numpy("REFUSAL")[0].startswith(b"Request for unknown model: 'not_there' is not found")


@pytest.mark.parametrize("count", [0, 1, 7])
def test_any_number_of_responses(stream, count):
    results, errors = stream.infer("repeat", infer_input("IN", np.arange(count, dtype=np.int32)))
    assert [int(result.as_numpy("OUT")[0]) for result in results] == list(range(count))
    assert [int(result.as_numpy("IDX")[0]) for result in results] == list(range(count))
    assert errors == []


def test_an_error_among_the_responses(stream):
    results, errors = stream.infer("repeat", infer_input("IN", np.array([5, -1, 6], np.int32)))
    assert [int(result.as_numpy("OUT")[0]) for result in results] == [5, 6]
    assert [("only what is not negative" in error) for error in errors] == [True]


@pytest.mark.parametrize("numbers", [[], [4, 5, 6]])
def test_a_call_of_a_decoupled_model(server, numbers):
    result = server.client().infer("collector", [infer_input("IN", np.array(numbers, np.int32))])
    assert result.as_numpy("SUM").tolist() == [sum(numbers)]
    assert b"Please use 'decoupled=True'" in result.as_numpy("SINGLE")[0]


def test_a_model_completes_its_configuration(server):
    client = server.client()
    config = client.get_model_config("completed", as_json=True)["config"]
    assert (config["max_batch_size"], "dynamic_batching" in config) == (16, True)
    assert [tensor["name"] for tensor in config["input"]] == ["DATA", "SCALE"]
    data = np.array([[1, 2, 3]], np.float32)
    assert client.infer("completed", [infer_input("DATA", data)]).as_numpy("SCALED").tolist() == [[2, 4, 6]]
    scale = infer_input("SCALE", np.array([[5]], np.float32))
    assert client.infer("completed", [infer_input("DATA", data), scale]).as_numpy("SCALED").tolist() == [[5, 10, 15]]


def test_errors_for_some_requests_of_a_batch(server):
    """The requests are batched together."""
    codes = {
        "NOT_FOUND": "NOT_FOUND",
        "INVALID_ARG": "INVALID_ARGUMENT",
        "CANCELLED": "CANCELLED",
        "UNSUPPORTED": "UNIMPLEMENTED",
    }
    refused = {f"code {word}": code for word, code in codes.items()}
    words = ["one", *refused, "two"] * 3

    def ask(word: str) -> object:
        try:
            return server.client().infer("moody", [text("WORD", word)]).as_numpy("ECHO")[0, 0].decode()
        except InferenceServerException as error:
            return error.status(), error.message()

    with ThreadPoolExecutor(len(words)) as pool:
        answers = list(pool.map(ask, words))
    assert answers == [(f"StatusCode.{refused[word]}", "as you wish") if word in refused else word for word in words]


def test_exceptions_and_exits_fail_the_batch_and_the_model_goes_on(server):
    client = server.client()
    for word, message in (
        ("raise", "message: ValueError: cannot bear 'raise'"),
        ("exit", "message: SystemExit: 3"),
        ("short", "InferenceRequest(s) size is:1, and InferenceResponse(s) size is:0"),
    ):
        with pytest.raises(InferenceServerException) as fault:
            client.infer("moody", [text("WORD", word)])
        assert fault.value.status() == "StatusCode.INTERNAL"
        assert "Failed to process the request(s) for model 'moody_" in fault.value.message()
        assert message in fault.value.message()
    assert client.infer("moody", [text("WORD", "fine")]).as_numpy("ECHO").tolist() == [[b"fine"]]
    wait_until(lambda: "heard fine" in server.log_text, "what the model prints, in the log")
    wait_until(lambda: 'model.py", line 19, in execute' in server.log_text, "the traceback in the log")


def test_what_models_see_of_requests_and_how_they_are_spread(server):
    client = server.client()

    def look(number: int) -> tuple[dict, dict]:
        result = server.client().infer("mirror", [infer_input("X", np.array([[number]], np.int32))])
        return json.loads(result.as_numpy("SEEN")[0, 0]), result.get_response(as_json=True)["parameters"]

    looks: list[tuple[dict, dict]] = []

    def have_both_been_used() -> bool:
        with ThreadPoolExecutor(8) as pool:
            looks.extend(pool.map(look, range(64)))
        return len({seen["pid"] for seen, _ in looks}) == 2

    wait_until(have_both_been_used, "answers of both instances")
    assert {seen["args"]["model_instance_name"] for seen, _ in looks} == {"mirror_0_0", "mirror_0_1"}
    assert looks[0][1]["kind"] == {"string_param": "mirror"}
    assert looks[0][1]["whole"] == {"bool_param": True}

    result = client.infer(
        "mirror",
        [infer_input("X", np.array([[0]], np.int32))],
        outputs=[triton.InferRequestedOutput("SEEN")],
        request_id="r-1",
        sequence_id=77,
        sequence_start=True,
        timeout=90_000_000,
        parameters={"mood": "good", "tries": 3, "sure": True},
    )
    seen = json.loads(result.as_numpy("SEEN")[0, 0])
    assert result.as_numpy("PID") is None
    assert (seen["request_id"], seen["correlation_id"], seen["flags"]) == ("r-1", 77, 1)
    assert (seen["timeout"], seen["requested"]) == (90_000_000, ["SEEN"])
    assert seen["parameters"] == {"mood": "good", "tries": 3, "sure": True}
    assert seen["model_parameters"] == {"colour": {"string_value": "green"}}
    folder = server.repositories[0] / "mirror"
    assert seen["args"].pop("model_instance_name").startswith("mirror_0_")
    assert seen["args"] == {
        "model_instance_kind": "CPU",
        "model_instance_device_id": "0",
        "model_repository": str(folder),
        "model_version": "1",
        "model_name": "mirror",
    }
    assert seen["model_dir"] == str(folder / "1")


def test_a_model_sees_that_its_client_has_gone(server):
    client = server.client()
    cancelled = threading.Event()
    call = client.async_infer("patient", [one("WAIT", True, "BOOL")], lambda result, error: cancelled.set())
    wait_until(lambda: "waiting for a client" in server.log_text, "the request in the model's hands")
    call.cancel()
    assert cancelled.wait(PATIENCE_SECONDS)
    assert client.infer("patient", [one("WAIT", False, "BOOL")]).as_numpy("CANCELLED").tolist() == [1]


def test_dlpack_and_bfloat16(server):
    brain = infer_input("BRAIN", np.array([1.0, -2.0], ml_dtypes.bfloat16))
    half = infer_input("HALF", np.array([1, 2, 3], np.float16))
    result = server.client().infer("bits", [half, brain])
    assert result.as_numpy("DOUBLED").tolist() == [2, 4, 6]
    assert result.as_numpy("SAME").astype(np.float32).tolist() == [1, -2]


def test_a_batch_works_in_the_memory_that_the_one_before_has_freed(server):
    client = server.client()

    def needs_few_new_pages() -> bool:
        return int(client.infer("images_joined", [one("COUNT", 64)]).as_numpy("FAULTS")[0]) < 1000

    # 64 images in one array and mirrored take 29 MB, 7,000 pages: glibc alone maps half of them again each time.
    wait_until(needs_few_new_pages, "a batch in memory that has been freed")


def test_an_environment_of_its_own(server):
    elements = server.client().infer("own_environment", [one("X", 0)]).as_numpy("TOLD")
    greeting, executable, prefix = (element.decode() for element in elements)
    assert greeting == "hello from in here"
    assert Path(prefix).name == "environment"
    assert Path(executable).is_relative_to(prefix)
    assert Path(prefix) != Path(sys.prefix)


def test_models_that_cannot_be_loaded_say_why(server):
    config = 'backend: "python"\ninput [{ name: "X" data_type: TYPE_FP32 dims: [1] }]\n'
    config += 'output [{ name: "Y" data_type: TYPE_FP32 dims: [1] }]\n'
    sources = {
        "unready": "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"
        "    def initialize(self, args):\n        raise RuntimeError('no weights')\n",
        "leaving": "import os\nos._exit(3)\n",
    }
    for name, source in sources.items():
        drop(server.repositories[0], name, source, config)
    client = server.client()

    expected = {
        "unready": "RuntimeError: no weights (1/model.py, line 5, in initialize)",
        "leaving": "status 3",
    }

    def are_reported() -> bool:
        reasons = {model.name: model.reason for model in client.get_model_repository_index().models}
        return all(message in reasons.get(name, "") for name, message in expected.items())

    wait_until(are_reported, "the reason for each model")
    assert client.is_server_live()


def test_a_changed_file_takes_over_and_the_old_model_is_finalized(server):
    """The last test of this server."""
    client = server.client()
    inputs = [infer_input(name, np.full((1, 4), 3, np.float32)) for name in ("INPUT0", "INPUT1")]
    assert client.infer("add_sub", inputs).as_numpy("OUTPUT0").tolist() == [[6] * 4]
    model = server.repositories[0] / "add_sub" / "1" / "model.py"
    model.write_text(model.read_text().replace("(in_0 + in_1)", "(in_0 * in_1)"))
    wait_until(
        lambda: client.infer("add_sub", inputs).as_numpy("OUTPUT0").tolist() == [[9] * 4], "the new model's answer"
    )
    words = "add_sub:1: Cleaning up..."
    wait_until(lambda: server.log_text.count(words) == 1, "the old model's last words")
    assert server.terminate() == 0
    wait_until(lambda: server.log_text.count(words) == 2, "the new model's last words")
