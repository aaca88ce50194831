"""An engine that answers requests, for tests; the config's parameter `behaviour` says what it does."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Sequence

import numpy as np

from rocserve.backends.request_model import Answer, ModelCall, ModelRequest, ModelResponse, RequestModelSource
from rocserve.core.errors import ServeError, StatusCode, invalid_argument
from rocserve.core.model_config import ModelConfig
from rocserve.core.requests import Signature
from rocserve.core.tensors import Tensor, tensor_from_numpy


def load(model: RequestModelSource) -> Model:
    return Model(model)


def out(values: object) -> Tensor:
    return tensor_from_numpy("OUT", np.asarray(values, np.float32))


def text(values: object) -> Tensor:
    return tensor_from_numpy("TEXT", np.array(values, dtype=np.object_))


class Model:
    def __init__(self, source: RequestModelSource) -> None:
        self._source = source
        parameters = source.source.config.parameters
        self._behaviour = parameters.get("behaviour", "echo")
        self._target = parameters.get("target", "")
        self.reads_in_place = self._behaviour == "in_place"
        self.signature = Signature((), (), True, decoupled=parameters.get("asks_for") == "decoupled")
        self._kept: list[ModelRequest] = []
        self._initialized = ""
        self._array = np.zeros((0, 1), np.float32)

    def initialize(self, config: ModelConfig, config_json: str) -> None:
        self._initialized = config_json
        print(f"initialized {self._source.instance_name}", flush=True)

    def execute(self, requests: Sequence[ModelRequest]) -> Sequence[Answer | None]:
        answer = getattr(self, f"_{self._behaviour}")
        return answer(requests)  # type: ignore[no-any-return]

    def close(self) -> None:
        print("closed", flush=True)

    def _echo(self, requests: Sequence[ModelRequest]) -> list[Answer | None]:
        return [
            ModelResponse([_as_out(request), self._details(request, len(requests))], {"of": request.id})
            for request in requests
        ]

    def _in_place(self, requests: Sequence[ModelRequest]) -> list[Answer | None]:
        """The inputs themselves, if they cannot be written to."""
        return [
            ModelResponse([_as_out(request)])
            if not request.inputs["IN"].numpy().flags.writeable
            else invalid_argument("the input is a copy")
            for request in requests
        ]

    def _details(self, request: ModelRequest, together: int) -> Tensor:
        details = {
            "id": request.id,
            "correlation_id": request.correlation_id,
            "flags": request.flags,
            "priority": request.priority,
            "timeout": request.timeout_microseconds,
            "parameters": dict(request.parameters),
            "requested": list(request.requested_outputs),
            "together": together,
            "thread": threading.current_thread().name,
            "instance": self._source.instance_name,
            "config": json.loads(self._initialized),
            "config_before": json.loads(self._source.config_json),
            "pid": os.getpid(),
        }
        return Tensor("TEXT", *_bytes([[json.dumps(details)]] * request.inputs["IN"].shape[0]))

    def _renamed(self, requests: Sequence[ModelRequest]) -> list[Answer | None]:
        """Outputs of other lengths than the inputs, for each request, and one that was not requested."""
        return [
            ModelResponse([out([[value] * int(value) for value in request.inputs["IN"].numpy()[0, :1]]), text(["x"])])
            for request in requests
        ]

    def _reuses(self, requests: Sequence[ModelRequest]) -> list[Answer | None]:
        """One array for all requests of a batch."""
        if len(requests) > len(self._array):
            self._array = np.zeros((len(requests), 1), np.float32)
        for place, request in enumerate(requests):
            self._array[place] = request.inputs["IN"].numpy()[0]
        return [ModelResponse([out(self._array[place : place + 1])]) for place in range(len(requests))]

    def _crashes(self, requests: Sequence[ModelRequest]) -> list[Answer | None]:
        """At a negative number."""
        if any((request.inputs["IN"].numpy() < 0).any() for request in requests):
            os.kill(os.getpid(), signal.SIGKILL)
        return [ModelResponse([out(request.inputs["IN"].numpy())]) for request in requests]

    def _picky(self, requests: Sequence[ModelRequest]) -> list[Answer | None]:
        return [
            invalid_argument(f"{request.id} is negative")
            if (request.inputs["IN"].numpy() < 0).any()
            else ModelResponse([out(request.inputs["IN"].numpy() * 2)])
            for request in requests
        ]

    def _raises(self, requests: Sequence[ModelRequest]) -> list[Answer | None]:
        """Raise after the first request is answered, if there are several."""
        if len(requests) > 1:
            requests[0].responder.send(ModelResponse([_as_out(requests[0])]), True)
        raise RuntimeError("the model's own words")

    def _too_few(self, requests: Sequence[ModelRequest]) -> list[Answer | None]:
        return []

    def _keeps(self, requests: Sequence[ModelRequest]) -> list[Answer | None]:
        """Each request gets the sum of all inputs so far; inputs may be written to."""
        self._kept += requests
        total = sum(float(request.inputs["IN"].numpy().sum()) for request in self._kept)
        for request in requests:
            request.inputs["IN"].numpy()[:] = 1.0
        return [ModelResponse([out([[total]])]) for _ in requests]

    def _counts(self, requests: Sequence[ModelRequest]) -> list[Answer | None]:
        """As many responses as the request's number says, from a thread, after `execute` has returned."""
        threading.Thread(target=self._count, args=(requests,), daemon=True).start()
        return [None] * len(requests)

    def _count(self, requests: Sequence[ModelRequest]) -> None:
        time.sleep(0.05)
        for request in requests:
            for number in range(int(request.inputs["IN"].numpy()[0, 0])):
                request.responder.send(ModelResponse([out([[number]])]), False)
            request.responder.send(None, True)

    def _waits(self, requests: Sequence[ModelRequest]) -> list[Answer | None]:
        """Send a response, and stay open until the request is cancelled."""
        for request in requests:
            threading.Thread(target=self._wait, args=(request,), daemon=True).start()
        return [None] * len(requests)

    def _wait(self, request: ModelRequest) -> None:
        request.responder.send(ModelResponse([out([[0]])]), False)
        while not request.responder.is_cancelled:
            time.sleep(0.005)
        print(f"cancelled {request.id}", flush=True)
        request.responder.send(ServeError(StatusCode.CANCELLED, "nobody waits"), True)

    def _descends(self, requests: Sequence[ModelRequest]) -> list[Answer | None]:
        """Call itself with one less, down to 0."""
        (request,) = requests
        value = float(request.inputs["IN"].numpy()[0, 0])
        if not value:
            return [ModelResponse([out([[0]])])]
        less = tensor_from_numpy("IN", np.array([[value - 1]], np.float32))
        return [self._call(ModelCall(self._source.source.name, [less], ("OUT",)))]

    def _calls(self, requests: Sequence[ModelRequest]) -> list[Answer | None]:
        """Pass each request on to another model; its last response is the answer."""
        return [
            self._call(
                ModelCall(
                    self._target,
                    list(request.inputs.values()),
                    ("OUT",),
                    id=f"{request.id}'",
                    parameters={"by": "call"},
                )
            )
            for request in requests
        ]

    def _call(self, call: ModelCall) -> Answer:
        answers: list[Answer | None] = []
        done = threading.Event()

        def on_answer(answer: Answer | None, final: bool) -> None:
            answers.append(answer)
            if final:
                done.set()

        self._source.calls.call(call, on_answer)
        done.wait()
        return _summary(answers)


def _as_out(request: ModelRequest) -> Tensor:
    tensor = request.inputs["IN"]
    return Tensor("OUT", tensor.datatype, tensor.shape, tensor.data)


def _summary(answers: list[Answer | None]) -> Answer:
    """An error unchanged; a single response unchanged; else the number of responses."""
    errors = [answer for answer in answers if isinstance(answer, ServeError)]
    if errors:
        return errors[0]
    responses = [answer for answer in answers if isinstance(answer, ModelResponse)]
    return responses[0] if len(answers) == 1 else ModelResponse([out([[len(responses)]])], {"said": len(answers)})


def _bytes(rows: list[list[str]]) -> tuple[object, ...]:
    tensor = tensor_from_numpy("", np.array(rows, dtype=np.object_))
    return tensor.datatype, tensor.shape, tensor.data
