"""Models with open requests, under faults: no client waits for ever, and nothing is left behind."""

from __future__ import annotations

import queue
from contextlib import ExitStack
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton
from support.infer_inputs import infer_input
from support.models import answering, drop
from support.repository_index import models_of
from support.server import RocserveProcess, Start
from support.waiting import PATIENCE_SECONDS, wait_until
from tritonclient.utils import InferenceServerException

STREAMS = 200

CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ -1 ] }
"""
DECOUPLED = CONFIG + "model_transaction_policy { decoupled: true }"

# One response immediately, the next when the file `release-NAME` appears next to the repository, or an error once the
# client has left. The model writes a file there for each request.
HELD = """
import pathlib
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.name, self.folder = args["model_name"], pathlib.Path(__file__).parents[3]

    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.hold, args=(request,), daemon=True).start()

    def hold(self, request):
        value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        sender = request.get_response_sender()
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value)]))
        (self.folder / f"{self.name}-{value[0]}").touch()
        while not (self.folder / f"release-{self.name}").exists() and not request.is_cancelled():
            time.sleep(0.01)
        if request.is_cancelled():
            error = pb_utils.TritonError("nobody waits", pb_utils.TritonError.CANCELLED)
            sender.send(pb_utils.InferenceResponse(error=error), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            return
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value + 1)]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

CALLER = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            call = pb_utils.InferenceRequest(
                model_name="called", requested_output_names=["OUT"], inputs=request.inputs()
            )
            last = None
            for response in call.exec(decoupled=True):
                if response.has_error():
                    raise pb_utils.TritonModelException(response.error().message())
                last = response if response.output_tensors() else last
            responses.append(last)
        return responses
"""

FLOOD = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            count = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0])
            sender = request.get_response_sender()
            for number in range(count):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.full(1000, number, np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

ECHO = answering("IN", "OUT")


@pytest.fixture(scope="module")
def server(start: Start, tmp_path_factory: pytest.TempPathFactory) -> RocserveProcess:
    """Serves what the tests load; each has its own models."""
    repository = tmp_path_factory.mktemp("open") / "repository"
    repository.mkdir()
    return start(repository, "--model-control-mode=explicit")


def load(server: RocserveProcess, name: str, model: str, config: str) -> None:
    drop(server.repositories[0], name, model, config)
    with server.client() as client:
        client.load_model(name)


def release(server: RocserveProcess, name: str) -> None:
    (server.repositories[0].parent / f"release-{name}").touch()


def tensor(value: int) -> triton.InferInput:
    return infer_input("IN", np.array([value], np.int32))


class Stream:
    """A client with a stream."""

    def __init__(self, server: RocserveProcess) -> None:
        self.client = server.client()
        self.answers: queue.Queue[tuple[Any, InferenceServerException | None]] = queue.Queue()
        self.client.start_stream(lambda result, error: self.answers.put((result, error)))

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.stop_stream(cancel_requests=True)
        self.client.close()

    def ask(self, model: str, value: int, **options: Any) -> None:
        self.client.async_stream_infer(model, [tensor(value)], **options)

    def value(self) -> int:
        result, error = self.answers.get(timeout=PATIENCE_SECONDS)
        assert error is None, error
        return int(result.as_numpy("OUT")[0])

    def error(self) -> str:
        result, error = self.answers.get(timeout=PATIENCE_SECONDS)
        assert error is not None, result
        return str(error.message())


def counters(client: triton.InferenceServerClient, model: str) -> tuple[int, int]:
    """How many requests have succeeded, and how many failed."""
    (row,) = client.get_inference_statistics(model).model_stats
    return row.inference_stats.success.count, row.inference_stats.fail.count


def worker_of(server: RocserveProcess, model: str) -> psutil.Process:
    (worker,) = server.workers(model)
    return worker


def test_a_kill_fails_the_open_requests_and_nothing_else(server: RocserveProcess):
    load(server, "held", HELD, DECOUPLED)
    load(server, "echo", ECHO, CONFIG)
    with Stream(server) as stream:
        for value in range(5):
            stream.ask("held", value, request_id=str(value))
        assert sorted(stream.value() for _ in range(5)) == [0, 1, 2, 3, 4]
        worker_of(server, "held").kill()
        for _ in range(5):
            text = stream.error()
            assert "worker of model 'held' version 1 ended unexpectedly (killed by signal 9)" in text
        # The stream is intact, and so is the model.
        stream.ask("echo", 7)
        assert stream.value() == 7
        release(server, "held")
        stream.ask("held", 8)
        assert [stream.value(), stream.value()] == [8, 9]
    # The model ends its request after the last response; the client need not wait for that.
    client = server.client()
    wait_until(lambda: counters(client, "held") == (1, 5), "the end of the request")


def test_a_kill_on_either_side_of_a_call(server: RocserveProcess):
    load(server, "called", HELD, DECOUPLED)
    load(server, "asking", CALLER, CONFIG)
    client, folder = server.client(), server.repositories[0].parent
    with Stream(server) as stream:
        # Kill the called model: the call fails with the reason, and the caller goes on.
        caller = worker_of(server, "asking")
        stream.ask("asking", 1)
        wait_until((folder / "called-1").exists, "the call")
        worker_of(server, "called").kill()
        assert "worker of model 'called' version 1 ended unexpectedly (killed by signal 9)" in stream.error()
        # Kill the caller: the called model sees its call cancelled, and goes on.
        stream.ask("asking", 2)
        wait_until(lambda: server.workers("called"), "the new worker")
        held = worker_of(server, "called")
        wait_until((folder / "called-2").exists, "the call")
        caller.kill()
        assert "worker of model 'asking' version 1 ended unexpectedly (killed by signal 9)" in stream.error()
        wait_until(lambda: counters(client, "called") == (0, 2), "the end of the cancelled call")
        assert worker_of(server, "called").pid == held.pid
        release(server, "called")
        stream.ask("asking", 3)
        assert stream.value() == 4


def test_an_unload_waits_for_open_requests(server: RocserveProcess):
    load(server, "gone", HELD, DECOUPLED)
    client = server.client()
    with Stream(server) as stream:
        stream.ask("gone", 1)
        assert stream.value() == 1
        client.unload_model("gone")
        assert not client.is_model_ready("gone")
        assert models_of(server)["gone"][0] == "UNLOADING"
        stream.ask("gone", 2)
        assert "gone" in stream.error()
        release(server, "gone")
        assert stream.value() == 2
        wait_until(lambda: not server.workers("gone"), "the end of the worker")


def test_two_hundred_open_streams(server: RocserveProcess):
    load(server, "many", HELD, DECOUPLED)
    process = server.server_process()
    client = server.client()
    descriptors = process.num_fds()
    with ExitStack() as open_streams:
        streams = [open_streams.enter_context(Stream(server)) for _ in range(STREAMS)]
        for value, stream in enumerate(streams):
            stream.ask("many", value)
        assert [stream.value() for stream in streams] == list(range(STREAMS))
        # Half of the clients leave.
        for stream in streams[: STREAMS // 2]:
            stream.client.stop_stream(cancel_requests=True)
        wait_until(lambda: counters(client, "many") == (0, STREAMS // 2), "the end of what nobody waits for")
        release(server, "many")
        assert [stream.value() for stream in streams[STREAMS // 2 :]] == list(range(STREAMS // 2 + 1, STREAMS + 1))
        wait_until(lambda: counters(client, "many") == (STREAMS // 2, STREAMS // 2), "the end of all requests")
    # Besides descriptors for clients: the memory of concurrent batches, eight before Python 3.13.
    wait_until(lambda: process.num_fds() <= descriptors + 12, "as many descriptors as before")


def test_a_flood_is_bounded_and_holds_nobody_up(server: RocserveProcess):
    load(server, "flood", FLOOD, DECOUPLED)
    load(server, "another", ECHO, CONFIG)
    client = server.client()
    with Stream(server) as stream:
        stream.ask("flood", 5_000)
        for value in range(50):
            assert int(client.infer("another", [tensor(value)]).as_numpy("OUT")[0]) == value
        assert [stream.value() for _ in range(5_000)] == list(range(5_000))
    wait_until(lambda: counters(client, "flood") == (1, 0), "the end of the flood")
    # A batch whose client has left runs to its end, and its answer is discarded.
    with Stream(server) as stream:
        stream.ask("flood", 5_000)
        assert stream.value() == 0
    wait_until(lambda: counters(client, "flood") == (2, 0), "the end of the flood that nobody reads")
