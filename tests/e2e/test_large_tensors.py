"""Tensors that are copied in steps, on each path, with tritonclient against a real server."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as over_http
from onnx import TensorProto
from support.infer_inputs import infer_input
from support.models import drop, identity
from support.server import RocserveProcess
from support.shared_memory import shared_file
from support.waiting import PATIENCE_SECONDS
from tritonclient.utils import InferenceServerException

FLOATS = np.arange(6 << 20, dtype=np.float32)
"""24 MiB."""
WORDS = np.array([b"%d" % number for number in range(200_000)], np.object_)
CONFIG = """
platform: "onnx_onnxv1"
input {{ name: "INPUT0" data_type: {0} dims: [ -1 ] }}
output {{ name: "OUTPUT0" data_type: {0} dims: [ -1 ] }}
"""
CHAIN = """
platform: "ensemble"
input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } ]
ensemble_scheduling {
  step { model_name: "floats" model_version: -1
    input_map { key: "INPUT0" value: "IN" } output_map { key: "OUTPUT0" value: "BETWEEN" } }
  step { model_name: "floats" model_version: -1
    input_map { key: "INPUT0" value: "BETWEEN" } output_map { key: "OUTPUT0" value: "OUT" } }
}
"""


MANY = """
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
instance_group { kind: KIND_CPU }
"""
MANY_PY = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            array = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            sender = request.get_response_sender()
            for number in range(4):
                part = array + number if number % 2 == 0 else array[:3] + number
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", part)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


@pytest.fixture(scope="module", params=[0, 1], ids=["one-process", "front-ends"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocserveProcess]:
    folder = tmp_path_factory.mktemp("large_tensors")
    repository = folder / "repository"
    drop(repository, "floats", identity(TensorProto.FLOAT, ["n"]), CONFIG.format("TYPE_FP32"))
    drop(repository, "words", identity(TensorProto.STRING, ["n"]), CONFIG.format("TYPE_STRING"))
    drop(repository, "chain", None, CHAIN)
    drop(repository, "many", MANY_PY, MANY)
    flags = ("--allow-client-shm=true", "--max-request-memory=1073741824", f"--front-ends={request.param}")
    with RocserveProcess([repository], *flags, log=folder / "log") as process:
        process.wait_until_ready()
        yield process


@pytest.fixture
def client(server: RocserveProcess) -> Iterator[triton.InferenceServerClient]:
    with server.client() as client:
        yield client


def tensor(array: np.ndarray[Any, Any], name: str = "INPUT0", library: Any = triton) -> Any:
    return infer_input(name, array, library)


def test_over_grpc(client: triton.InferenceServerClient) -> None:
    for array, model in ((FLOATS, "floats"), (WORDS, "words")):
        for _ in range(2):
            answer = client.infer(model, [tensor(array)], request_id="7")
            np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), array)
            assert answer.get_response().id == "7"


def test_through_a_stream(client: triton.InferenceServerClient) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    small = FLOATS[:4]
    for number, array in enumerate((FLOATS, small, FLOATS, small)):
        client.async_stream_infer("floats", [tensor(array)], request_id=str(number))
    for number, array in enumerate((FLOATS, small, FLOATS, small)):
        result, error = answers.get(timeout=PATIENCE_SECONDS)
        assert error is None and result.get_response().id == str(number)
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), array)
    client.stop_stream()


def test_responses_of_a_decoupled_model_in_their_order(client: triton.InferenceServerClient) -> None:
    """Large and small responses, which take different paths."""
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    client.async_stream_infer("many", [tensor(FLOATS)], enable_empty_final_response=True)
    for number in range(4):
        result, error = answers.get(timeout=PATIENCE_SECONDS)
        assert error is None
        expected = FLOATS if number % 2 == 0 else FLOATS[:3]
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), expected + np.float32(number))
    assert answers.get(timeout=PATIENCE_SECONDS)[0].get_response().parameters["triton_final_response"].bool_param
    client.stop_stream()


def test_over_http(server: RocserveProcess) -> None:
    with over_http.InferenceServerClient(server.http_address, network_timeout=PATIENCE_SECONDS) as client:
        for array, model in ((FLOATS, "floats"), (WORDS, "words")):
            given = tensor(array, library=over_http)
            np.testing.assert_array_equal(client.infer(model, [given]).as_numpy("OUTPUT0"), array)


def test_through_an_ensemble(client: triton.InferenceServerClient) -> None:
    np.testing.assert_array_equal(client.infer("chain", [tensor(FLOATS, "IN")]).as_numpy("OUT"), FLOATS)


def test_in_shared_memory(client: triton.InferenceServerClient) -> None:
    nbytes = FLOATS.nbytes
    with shared_file(2 * nbytes) as file:
        file.put(0, FLOATS.tobytes())
        client.register_system_shared_memory("r", file.key, 2 * nbytes)
        given, wanted = triton.InferInput("INPUT0", FLOATS.shape, "FP32"), triton.InferRequestedOutput("OUTPUT0")
        given.set_shared_memory("r", nbytes)
        wanted.set_shared_memory("r", nbytes, nbytes)
        answer = client.infer("floats", [given], outputs=[wanted])
        assert answer.get_output("OUTPUT0").shape == [*FLOATS.shape]
        assert file.get(nbytes, nbytes) == FLOATS.tobytes()
        client.unregister_system_shared_memory()


def test_one_of_many_strings_that_is_broken_off(client: triton.InferenceServerClient) -> None:
    given = tensor(WORDS)
    given._raw_content = given._raw_content[:-1]
    with pytest.raises(InferenceServerException) as caught:
        client.infer("words", [given], request_id="7")
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert caught.value.message() == (
        "[request id: 7] incomplete string data for inference input 'INPUT0' for model 'words', expecting string of"
        " length 6 but only 5 bytes available"
    )
    assert client.infer("words", [tensor(WORDS[:3])]).as_numpy("OUTPUT0").tolist() == WORDS[:3].tolist()
