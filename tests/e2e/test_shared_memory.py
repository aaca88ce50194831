"""Tensors in clients' shared memory, with tritonclient's own tools, against a real server."""

from __future__ import annotations

import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton
import tritonclient.utils.shared_memory as shm
from onnx import TensorProto
from support.infer_inputs import infer_input
from support.metrics import FLAGS, port_of, scrape
from support.models import add_sub, drop, identity
from support.processes import has_ended, name_of
from support.server import RocserveProcess, Start
from support.shared_memory import SharedFile, shared_file
from support.waiting import PATIENCE_SECONDS, wait_until
from tritonclient.utils import InferenceServerException

LEFT = np.arange(16, dtype=np.int32).reshape(1, 16)
RIGHT = np.full((1, 16), 3, np.int32)
NBYTES = LEFT.nbytes
LARGE = 3 << 20
"""Elements of the model with large tensors."""
WIDE = 50_000
PYTHON_MODELS = Path(__file__).parents[1] / "data" / "python-models"
PYTHON_IDENTITY = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        for add, name in ((config.add_input, "INPUT0"), (config.add_output, "OUTPUT0")):
            add({"name": name, "data_type": "TYPE_FP32", "dims": [-1]})
        config.set_max_batch_size(0)
        return config

    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", given)]) for given in inputs]
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared_memory") / "repository"
    # A request waits until another one arrives.
    plain = 'platform: "onnx_onnxv1"\nmax_batch_size: 8\n'
    batching = f"{plain}dynamic_batching {{ preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 90000000 }}\n"
    drop(folder, "add_sub", add_sub(), plain)
    drop(folder, "patient", add_sub(), batching)
    drop(folder, "wide", identity(TensorProto.FLOAT, ["batch", WIDE]), batching)
    drop(folder, "large", identity(TensorProto.FLOAT, [LARGE]))
    shutil.copytree(PYTHON_MODELS / "repeat", folder / "repeat")
    drop(folder, "python", PYTHON_IDENTITY, 'backend: "python"\n')
    return folder


@pytest.fixture(scope="module")
def server(start: Start, repository: Path) -> RocserveProcess:
    return start(repository, *FLAGS, "--allow-client-shm=true")


@pytest.fixture
def client(server: RocserveProcess) -> Iterator[triton.InferenceServerClient]:
    with server.client() as client:
        yield client
        client.unregister_system_shared_memory()


@pytest.fixture
def file() -> Iterator[SharedFile]:
    with shared_file(4 * NBYTES) as made:
        made.put(0, LEFT.tobytes() + RIGHT.tobytes())
        yield made


def shared_inputs(names: tuple[str, str] = ("INPUT0", "INPUT1"), region: str = "r") -> list[triton.InferInput]:
    entries = [triton.InferInput(name, [1, 16], "INT32") for name in names]
    for index, entry in enumerate(entries):
        entry.set_shared_memory(region, NBYTES, index * NBYTES)
    return entries


def shared_output(name: str, nbytes: int = NBYTES, offset: int = 2 * NBYTES) -> triton.InferRequestedOutput:
    output = triton.InferRequestedOutput(name)
    output.set_shared_memory("r", nbytes, offset)
    return output


def integers(file: SharedFile, offset: int = 2 * NBYTES) -> list[int]:
    return np.frombuffer(file.get(offset, NBYTES), np.int32).tolist()


def waits(server: RocserveProcess, model: str = "patient") -> bool:
    """Whether a request is in the model's queue."""
    return scrape(port_of(server))[f'nv_inference_pending_request_count{{model="{model}",version="1"}}'] == "1"


def mapped(process: psutil.Process) -> str:
    """The process's memory map; "" once it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{process.pid}/maps").read_text()
    return ""


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(InferenceServerException) as caught:
        call()
    return f"{caught.value.status()}: {caught.value.message()}"


def test_tritonclients_own_way(client):
    keys = [f"/rocserve_{os.getpid()}_{name}" for name in ("in", "out")]
    left, right = (shm.create_shared_memory_region(key, key, 128) for key in keys)
    try:
        shm.set_shared_memory_region(left, [LEFT[0], RIGHT[0]])
        client.register_system_shared_memory("in_data", keys[0], 128)
        client.register_system_shared_memory("out_data", keys[1], 128)
        status = client.get_system_shared_memory_status(as_json=True)["regions"]
        assert status["in_data"] == {"name": "in_data", "key": keys[0], "byte_size": "128"}
        assert set(status) == {"in_data", "out_data"}
        outputs = []
        for index in (0, 1):
            outputs.append(triton.InferRequestedOutput(f"OUTPUT{index}"))
            outputs[-1].set_shared_memory("out_data", NBYTES, index * NBYTES)
        result = client.infer("add_sub", shared_inputs(region="in_data"), outputs=outputs)
        assert [output.name for output in result.get_response().outputs] == ["OUTPUT0", "OUTPUT1"]
        assert list(result.get_response().raw_output_contents) == [b"", b""]
        assert shm.get_contents_as_numpy(right, np.int32, [1, 16]).tolist() == (LEFT + RIGHT).tolist()
        assert shm.get_contents_as_numpy(right, np.int32, [1, 16], NBYTES).tolist() == (LEFT - RIGHT).tolist()
        client.unregister_system_shared_memory("in_data")
        assert set(client.get_system_shared_memory_status().regions) == {"out_data"}
        client.unregister_system_shared_memory()
        assert not client.get_system_shared_memory_status().regions
    finally:
        shm.destroy_shared_memory_region(left)
        shm.destroy_shared_memory_region(right)


def test_workers_have_a_clients_file_until_it_is_unregistered_but_for_those_that_bring_code(client, server):
    values = np.random.default_rng(4).random(LARGE, dtype=np.float32)

    def readers(file: SharedFile) -> dict[str, psutil.Process]:
        processes = server.server_process().children(recursive=True)
        return {name_of(process): process for process in processes if file.path.name in mapped(process)}

    with shared_file(values.nbytes) as file:
        file.put(0, values.tobytes())
        client.register_system_shared_memory("r", file.key, values.nbytes)
        entry = triton.InferInput("INPUT0", values.shape, "FP32")
        entry.set_shared_memory("r", values.nbytes)
        for model in ("large", "python"):
            assert (client.infer(model, [entry]).as_numpy("OUTPUT0") == values).all()
        (worker,) = readers(file).values()
        assert worker.name() == "rocserve:large"
        worker.kill()
        wait_until(lambda: has_ended(worker.pid), "the worker's end")
        wait_until(lambda: client.is_model_ready("large"))
        assert (client.infer("large", [entry]).as_numpy("OUTPUT0") == values).all()
        assert [process != worker for process in readers(file).values()] == [True]
        client.unregister_system_shared_memory("r")
        wait_until(lambda: not readers(file))


def test_each_response_of_a_stream_is_left_in_the_region(client, file):
    file.put(0, np.array([7, 8], np.int32).tobytes())
    client.register_system_shared_memory("r", file.key, 4 * NBYTES)
    answers: queue.Queue[tuple[triton.InferResult | None, InferenceServerException | None]] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    entry = triton.InferInput("IN", [2], "INT32")
    entry.set_shared_memory("r", 8)
    client.async_stream_infer("repeat", [entry], outputs=[shared_output("OUT", 4)])
    for _ in range(2):
        result, error = answers.get(timeout=PATIENCE_SECONDS)
        assert error is None
        response = result.get_response()
        assert [(output.name, list(output.shape)) for output in response.outputs] == [("OUT", [1])]
        assert list(response.raw_output_contents) == [b""]
    assert integers(file)[:2] == [8, 0]
    client.async_stream_infer("repeat", [entry], outputs=[shared_output("OUT", 3)])
    for _ in range(2):
        assert "for output 'OUT' (3 bytes) should be at least 4 bytes" in str(answers.get(timeout=PATIENCE_SECONDS)[1])
    client.stop_stream()


class Answers:
    """The answers to asynchronous requests, in order."""

    def __init__(self) -> None:
        self._queue: queue.Queue[InferenceServerException | None] = queue.Queue()

    def __call__(self, result: triton.InferResult | None, error: InferenceServerException | None) -> None:
        self._queue.put(error)

    def next(self) -> InferenceServerException | None:
        return self._queue.get(timeout=PATIENCE_SECONDS)


def test_a_file_that_is_cut_fails_its_own_requests_and_harms_nobody(client, server, file):
    client.register_system_shared_memory("r", file.key, 4 * NBYTES)
    answers = Answers()
    # It waits in the queue for a larger batch while its file is truncated.
    client.async_infer("patient", shared_inputs(), callback=answers, outputs=[shared_output("OUTPUT0")])
    wait_until(lambda: waits(server))
    file.cut(NBYTES)
    entries = [triton.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
    for entry in entries:
        entry.set_data_from_numpy(LEFT)
    assert client.infer("patient", entries).as_numpy("OUTPUT0").tolist() == (LEFT + LEFT).tolist()
    error = answers.next()
    assert error is not None
    assert f"shared memory region 'r' has been cut: byte 192 of '{file.key}' is needed, which has 64 now" in str(error)
    assert "byte 128 of" in refused(lambda: client.infer("add_sub", shared_inputs()))


def test_a_large_input_that_is_cut_while_it_waits(client, server):
    values = np.random.default_rng(2).random((1, WIDE), dtype=np.float32)
    with shared_file(values.nbytes, "wide") as file:
        file.put(0, values.tobytes())
        client.register_system_shared_memory("wide", file.key, values.nbytes)
        entry = triton.InferInput("INPUT0", values.shape, "FP32")
        entry.set_shared_memory("wide", values.nbytes)
        answers = Answers()
        client.async_infer("wide", [entry], callback=answers)
        assert (client.infer("wide", [entry]).as_numpy("OUTPUT0") == values).all()
        assert answers.next() is None
        client.async_infer("wide", [entry], callback=answers)
        wait_until(lambda: waits(server, "wide"))
        file.cut(4096)
        assert (client.infer("wide", [infer_input("INPUT0", values)]).as_numpy("OUTPUT0") == values).all()
        error = answers.next()
        assert error is not None
        assert f"'wide' has been cut: byte {values.nbytes} of '{file.key}' is needed, which has 4096 now" in str(error)


def test_a_file_that_is_cut_again_and_again_while_it_is_copied(client, server):
    values = np.random.default_rng(3).random(LARGE, dtype=np.float32)
    other = np.arange(LARGE, dtype=np.float32)
    sent, shared = (triton.InferInput("INPUT0", [LARGE], "FP32") for _ in range(2))
    sent.set_data_from_numpy(other)
    shared.set_shared_memory("r", values.nbytes)
    place = shared_output("OUTPUT0", values.nbytes, values.nbytes)
    serving = server.server_process()
    with shared_file(2 * values.nbytes) as file:
        client.register_system_shared_memory("r", file.key, 2 * values.nbytes)
        stopped = threading.Event()

        def cut() -> None:
            while not stopped.wait(0.001):
                file.cut(values.nbytes // 2)
                stopped.wait(0.001)
                file.cut(2 * values.nbytes)

        cutting = threading.Thread(target=cut)
        cutting.start()
        asked = refusals = 0

        def is_refused_often() -> bool:
            nonlocal asked, refusals
            asked += 1
            try:
                client.infer("large", [shared], outputs=[place])
            except InferenceServerException as error:
                assert "shared memory region 'r' " in str(error)
                refusals += 1
            return asked >= 40 and refusals >= 5

        try:
            wait_until(is_refused_often, "requests whose file was cut while it was read or written")
            assert (client.infer("large", [sent]).as_numpy("OUTPUT0") == other).all()
        finally:
            stopped.set()
            cutting.join()
        file.put(0, values.tobytes())
        client.infer("large", [shared], outputs=[place])
        assert file.get(values.nbytes, values.nbytes) == values.tobytes()
    assert serving.is_running() and server.server_process() == serving


def test_cudas_shared_memory_has_other_errors_than_the_systems(client, file):
    client.register_system_shared_memory("r", file.key, 64)
    assert not client.get_cuda_shared_memory_status().regions
    assert refused(lambda: client.get_cuda_shared_memory_status("r")) == (
        "StatusCode.NOT_FOUND: The region named 'r' is registered as system shared memory, not CUDA shared memory"
    )
    assert refused(lambda: client.get_cuda_shared_memory_status("q")) == (
        "StatusCode.NOT_FOUND: Unable to find cuda shared memory region: 'q'"
    )
    assert refused(lambda: client.register_cuda_shared_memory("r", b"", 0, 64)) == (
        "StatusCode.ALREADY_EXISTS: shared memory region 'r' already in manager"
    )
    assert refused(lambda: client.register_cuda_shared_memory("q", b"", 0, 64)) == (
        "StatusCode.INVALID_ARGUMENT: failed to register CUDA shared memory region: 'q', GPUs not supported"
    )
    client.unregister_cuda_shared_memory("r")
    client.unregister_cuda_shared_memory()
    assert set(client.get_system_shared_memory_status().regions) == {"r"}


def test_it_is_off_unless_allowed(serve, repository, file):
    with serve(repository).client() as client:
        disabled = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
        for call in (
            lambda: client.register_system_shared_memory("r", file.key, 64),
            client.unregister_system_shared_memory,
            lambda: client.register_cuda_shared_memory("r", b"", 0, 64),
            lambda: client.unregister_cuda_shared_memory("r"),
        ):
            assert refused(call) == f"StatusCode.UNIMPLEMENTED: {disabled}"
        assert not client.get_system_shared_memory_status().regions
        assert not client.get_cuda_shared_memory_status().regions
