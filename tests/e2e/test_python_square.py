"""Python models by how they answer: decoupled or not, `def` or `async def execute`, and each kind of sequence. In each
cell a model does right, and everything that a model can do wrong: clients get right values or a clear error."""

from __future__ import annotations

import itertools
import queue
import re
from collections.abc import Iterator

import numpy as np
import pytest
import tritonclient.grpc as triton
from support.infer_inputs import infer_input
from support.models import drop
from support.server import RocserveProcess, Start
from support.waiting import PATIENCE_SECONDS
from tritonclient.utils import InferenceServerException

MODEL = """
import asyncio
import threading
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
AGAIN = pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE


def response(value):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([[value]], np.int32))])


class TritonPythonModel:
    def initialize(self, args):
        self.is_decoupled, self.is_iterative = DECOUPLED, ITERATIVE
        self.sums, self.left = {}, {}

    ASYNC def execute(self, requests):
        results = []
        for request in requests:
            PAUSE
            results.append(self.one(request))
        if "a result too many" in results:
            return [response(0)] * (len(requests) + 1)
        if self.is_decoupled:
            return results if any(results) else None
        return results

    def one(self, request):
        value = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().reshape(-1)[0])
        does = pb_utils.get_input_tensor_by_name(request, "DOES").as_numpy().reshape(-1)[0].decode()
        sender, key = request.get_response_sender(), request.correlation_id()
        if not does:  # A row of no sequence.
            return sender.send(response(0), FINAL)
        if self.is_iterative and self.runs_again(request, value):
            return self.first(request, sender, does, value, value - self.left[key])
        return self.last(request, sender, does, self.sum_of(request, value))

    def first(self, request, sender, does, value, run):
        if does == "raises in the next run" and run == 2:
            raise ValueError("as asked")
        if does == "ends it and wants it again":
            sender.send(response(run), FINAL)
        elif does == "wants it again and sends":
            request.set_release_flags(AGAIN)
            sender.send(response(run))
        elif self.is_decoupled or does == "sends and wants it again":
            sender.send(response(run))
        if does == "wants it again from a thread":
            threading.Timer(0.005, request.set_release_flags, [AGAIN]).start()
        else:
            request.set_release_flags(AGAIN)
        return response(run) if does == "returns a response and wants it again" else None

    def runs_again(self, request, value):
        key = request.correlation_id()
        if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
            self.left[key] = value
        self.left[key] -= 1
        return self.left[key] > 0

    def sum_of(self, request, value):
        key = request.correlation_id()
        if self.is_iterative or not key or request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
            self.sums[key] = 0
        self.sums[key] += value
        return self.sums[key]

    def last(self, request, sender, does, value):
        if does == "raises":
            raise ValueError("as asked")
        if does == "returns a result too many":
            return "a result too many"
        if does == "sends after the last":
            sender.send(response(value), FINAL)
            sender.send(response(value))
        elif does == "sends and returns":
            sender.send(response(value), FINAL)
            return response(value)
        elif does == "sends without an end":
            sender.send(response(value))
        elif does == "sends from a thread":
            threading.Timer(0.005, sender.send, [response(value), FINAL]).start()
        elif does != "returns None":
            if not self.is_decoupled:
                return response(value)
            sender.send(response(value), FINAL)
        return None
"""
CONFIG = """
backend: "python"
max_batch_size: 2
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }, { name: "DOES" data_type: TYPE_STRING dims: [ 1 ] } ]
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
"""
KINDS = {
    "none": "",
    "direct": "sequence_batching { direct { } max_sequence_idle_microseconds: 90000000 }",
    "oldest": "sequence_batching { oldest { max_candidate_sequences: 2 } max_sequence_idle_microseconds: 90000000 }",
    "iterative": "sequence_batching { iterative_sequence: true oldest { max_candidate_sequences: 2 } }",
    "iterative-direct": "sequence_batching { iterative_sequence: true direct { } }",
}
WAYS = ("plain", "plain-async", "decoupled", "decoupled-async")


@pytest.fixture(scope="module")
def server(start: Start, tmp_path_factory: pytest.TempPathFactory) -> RocserveProcess:
    repository = tmp_path_factory.mktemp("square")
    for way, (kind, batching) in itertools.product(WAYS, KINDS.items()):
        is_decoupled, is_async = way.startswith("decoupled"), way.endswith("async")
        source = MODEL.replace("DECOUPLED", str(is_decoupled)).replace("ITERATIVE", str("iterative" in kind))
        source = source.replace("ASYNC ", "async " if is_async else "")
        source = source.replace("PAUSE", "await asyncio.sleep(0.001)" if is_async else "pass")
        more = "model_transaction_policy { decoupled: true }" if is_decoupled else ""
        drop(repository, f"{way}-{kind}", source, f"{CONFIG} {batching} {more}")
    return start(repository)


def inputs_of(does: str, value: int) -> list[triton.InferInput]:
    return [
        infer_input("IN", np.array([[value]], np.int32)),
        infer_input("DOES", np.array([[does.encode()]], dtype=object)),
    ]


class Client:
    """Asks one model after the other, over one stream."""

    def __init__(self, server: RocserveProcess) -> None:
        self._client = server.client()
        self._answers: queue.Queue[tuple[triton.InferResult | None, InferenceServerException | None]] = queue.Queue()
        self._client.start_stream(lambda result, error: self._answers.put((result, error)))
        self._numbers = itertools.count(1)

    def ask(self, model: str, does: str, value: int, **sequence: object) -> tuple[list[int], str]:
        """Return the values of all responses, and the error, or ""."""
        number = str(next(self._numbers))
        inputs = inputs_of(does, value)
        self._client.async_stream_infer(model, inputs, request_id=number, enable_empty_final_response=True, **sequence)
        values: list[int] = []
        while True:
            result, error = self._answers.get(timeout=PATIENCE_SECONDS)
            if error is not None:
                return values, error.message()
            assert result is not None
            response = result.get_response()
            assert response.id == number, "of another request"
            if response.outputs:
                values.append(int(result.as_numpy("OUT").reshape(-1)[0]))
            if response.parameters["triton_final_response"].bool_param:
                return values, ""

    def close(self) -> None:
        self._client.stop_stream()
        self._client.close()

    def ask_once(self, model: str, does: str, value: int, **sequence: object) -> tuple[list[int], str]:
        """Ask by a call that has one response."""
        try:
            result = self._client.infer(model, inputs_of(does, value), client_timeout=PATIENCE_SECONDS, **sequence)
        except InferenceServerException as error:
            return [], error.message()
        return [int(result.as_numpy("OUT").reshape(-1)[0])], ""

    def new_sequence(self) -> int:
        return next(self._numbers)


@pytest.fixture(scope="module")
def client(server: RocserveProcess) -> Iterator[Client]:
    opened = Client(server)
    yield opened
    opened.close()


RAISED = r"^Failed to process the request\(s\) for model '.*', message: ValueError: as asked$"
NO_RESPONSE = r"^model '.*' released a request without a response$"
TOO_MANY = "Number of InferenceResponse objects do not match the number of InferenceRequest objects"
NOT_NONE = "is using the decoupled mode and the execute function must return None"
HAS_SENT = "Unable to reschedule the request: its last response has been sent"
NOT_YET = "Unable to send response. The request is rescheduled"
LAST_RUN = {
    "does right": (True, "", ""),
    "raises": (False, RAISED, RAISED),
    "returns None": (False, NO_RESPONSE, ""),
    "returns a result too many": (False, TOO_MANY, NOT_NONE),
    "sends after the last": (True, "", ""),
    "sends and returns": (True, "", ""),
    "sends without an end": (True, "", ""),
    "sends from a thread": (True, "", ""),
}
"""What the model does in the last run of a request -> whether this run's value arrives, the error if the model is not
decoupled, and the error if it is."""
FIRST_RUN = {
    "wants it again from a thread": ([3], "", [1, 2, 3], ""),
    "wants it again and sends": ([], NOT_YET, [1, 2, 3], ""),
    "sends and wants it again": ([1], HAS_SENT, [1, 2, 3], ""),
    "ends it and wants it again": ([1], "", [1], ""),
    "raises in the next run": ([], RAISED, [1], RAISED),
    "returns a response and wants it again": ([], "Expected a None object in the execute function", [1], NOT_NONE),
}
"""What an iterative model does in the first of three runs, which have the values 1, 2 and 3 -> the values that arrive
and the error, if it is not decoupled, and if it is."""
DEEDS = [(kind, does) for kind in KINDS for does in (*LAST_RUN, *(FIRST_RUN if "iterative" in kind else ()))]


@pytest.mark.parametrize(("kind", "does"), DEEDS)
@pytest.mark.parametrize("way", WAYS)
def test_right_values_or_a_clear_error(client: Client, way: str, kind: str, does: str) -> None:
    model, is_decoupled = f"{way}-{kind}", way.startswith("decoupled")
    several = is_decoupled and "iterative" in kind
    if does in LAST_RUN:
        arrives, *errors = LAST_RUN[does]
        values, error = [*([1, 2] if several else []), *([3] if arrives else [])], errors[is_decoupled]
    else:
        values, error = FIRST_RUN[does][2:] if is_decoupled else FIRST_RUN[does][:2]
    begin, end = {"sequence_start": True}, {"sequence_end": True}
    sequence = {} if kind == "none" else {"sequence_id": client.new_sequence()}
    got, text = client.ask(model, does, 3, **sequence, **(begin if sequence else {}))
    assert got == values
    assert re.search(error, text) if error else not text
    if not is_decoupled:
        whole = {"sequence_id": client.new_sequence(), **begin, **end} if sequence else {}
        got, text = client.ask_once(model, does, 3, **whole)
        assert got == values
        assert re.search(error, text) if error and not values else not text
    # The model goes on, and so does a sequence whose request has failed.
    if "iterative" in kind:
        sequence, end = {"sequence_id": client.new_sequence()}, {**begin, **end}
    after = {"none": [4], "direct": [7], "oldest": [7]}.get(kind, [1, 2, 3, 4] if several else [4])
    assert client.ask(model, "does right", 4, **sequence, **(end if sequence else {})) == (after, "")
