"""Ensembles whose members a test answers by hand."""

from __future__ import annotations

import logging

import numpy as np

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.exchange import Exchange
from rocserve.core.latencies import LatencyOptions
from rocserve.core.model_config import EnsembleStep, InputConfig, ModelConfig, OutputConfig
from rocserve.core.request_memory import RequestMemory
from rocserve.core.requests import InferRequest, InputHead, RequestHead
from rocserve.core.responses import Answer as Answered
from rocserve.core.responses import InferResponse
from rocserve.core.serving import ServedModel, ServingTable, ServingTableHolder
from rocserve.core.statistics import ModelStatistics
from rocserve.core.tensors import Tensor
from rocserve.core.validation import RequestValidator
from rocserve.scheduling.ensemble.version import EnsembleVersion
from rocserve.scheduling.response_cache import CachedAnswers, ResponseCache
from support.dispatching import dispatcher_of

FP32 = DataType.FP32


HEAD = RequestHead("e", "", (InputHead("X", "FP32", (1, 2)),))


class Member:
    """A member that answers immediately with `rule` of its input, or keeps the request until `finish`."""

    def __init__(
        self, name: str, rule, max_batch_size: int = 8, held: bool = False, outputs=("OUT",), labels=()
    ) -> None:
        self.name = name
        self.version = 1
        self.sees_requests = False
        self.is_cold = False
        self.wanted = 0
        self.config = ModelConfig(
            name=name,
            max_batch_size=max_batch_size,
            inputs=(InputConfig("IN", FP32, (2,)),),
            outputs=tuple(OutputConfig(output, FP32, (2,), labels=labels) for output in outputs),
        )
        self.config_message = b""
        self.statistics = ModelStatistics()
        self.properties: dict[str, str] = {}
        self.requests: list[InferRequest] = []
        self._rule = rule
        self._held = held
        self._waiting: list = []
        self._validator = RequestValidator(self.config)

    def want(self) -> None:
        self.wanted += 1

    def infer(self, request: InferRequest, responder) -> None:
        try:
            plan = self._validator.validate(request)
        except ServeError as error:
            responder.send(error)
            return
        self.requests.append(request)
        if self._held:
            self._waiting.append((request, plan, responder))
        else:
            self._answer(request, plan, responder)

    def finish(self) -> None:
        self._answer(*self._waiting.pop(0))

    def _answer(self, request, plan, responder) -> None:
        try:
            values = self._rule(np.frombuffer(request.data[0], np.float32))
        except ServeError as error:
            responder.send(error)
            return
        shape = plan.inputs[0].shape
        outputs = [Tensor(name, FP32, shape, memoryview(values.tobytes())) for name in plan.outputs]
        responder.send(InferResponse.of(self.name, "1", request.id, outputs))


class Answer:
    def __init__(self) -> None:
        self.response: InferResponse | None = None
        self.error: ServeError | None = None
        self.count = 0

    def send(self, answer: Answered, final: bool = True) -> None:
        if isinstance(answer, ServeError):
            self.error = answer
        elif answer is not None:
            self.response = answer
        self.count += answer is not None

    def watch_cancellation(self, callback) -> None:
        self.leave = callback

    def value(self, index: int = 0) -> list[float]:
        assert self.error is None, self.error
        return np.frombuffer(self.response.outputs[index].data, np.float32).tolist()


class Many(Answer):
    """The client of a stream."""

    def expect_many(self) -> None: ...


def step(model: str, reads: str, writes: str, output: str = "OUT") -> EnsembleStep:
    return EnsembleStep(model, -1, {"IN": reads}, {output: writes})


def ensemble(
    *members: Member,
    steps,
    outputs=("Y",),
    max_batch_size: int = 8,
    decoupled: bool = False,
    memory: int = 1 << 20,
    latencies: LatencyOptions | None = None,
) -> EnsembleVersion:
    tables = ServingTableHolder()
    tables.table = ServingTable({member.name: ServedModel(member.name, {1: member}, member) for member in members})
    config = ModelConfig(
        name="e",
        backend="ensemble",
        max_batch_size=max_batch_size,
        inputs=(InputConfig("X", FP32, (2,)),),
        outputs=tuple(OutputConfig(name, FP32, (2,)) for name in outputs),
        ensemble_steps=tuple(steps),
        decoupled=decoupled,
    )
    statistics = ModelStatistics(None if latencies is None else latencies.distributions(config))
    version = EnsembleVersion(config, b"", 1, statistics, dispatcher_of(tables), RequestMemory(memory))
    # The repository adds these.
    version.properties, version.is_cold = {}, False
    return version


def ask(version: EnsembleVersion, *values: float, outputs=(), shape=None, **parameters) -> Answer:
    head = RequestHead(
        "e",
        "",
        (InputHead("X", "FP32", shape or (len(values) // 2, 2)),),
        tuple(outputs),
        parameters,
    )
    answer = Answer()
    version.infer(InferRequest(head, "id-1", [np.array(values, np.float32).tobytes()]), Exchange(answer))
    return answer


def plus(number: float):
    return lambda values: values + number


def follow(*versions: EnsembleVersion) -> None:
    """Let new requests run on the members in the table, as a publication does. Inner ensembles come first."""
    for version in versions:
        before, version.members = version.members, version.find_members(version.dispatcher.table.models)
        before.leave()


def serve(version: EnsembleVersion, *members) -> None:
    """Publish these members alone."""
    version.dispatcher.tables.table = ServingTable({one.name: ServedModel(one.name, {1: one}, one) for one in members})


def cached(version: EnsembleVersion) -> ResponseCache:
    """Give an ensemble a response cache."""
    cache = ResponseCache(1 << 20)
    version.answers = CachedAnswers(cache, version.config, version.statistics, logging.getLogger("test"))
    follow(version)
    return cache
