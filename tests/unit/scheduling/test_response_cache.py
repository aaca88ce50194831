"""The response cache: its store, and its use by a model that answers in the order of arrival."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
from support.hand_instances import Nobody
from support.waiting import PATIENCE_SECONDS

from rocserve.core.datatypes import DataType
from rocserve.core.exchange import Exchange
from rocserve.core.model_config import DynamicBatching, InputConfig, ModelConfig, OutputConfig, QueuePolicy
from rocserve.core.requests import InferRequest, InputHead, RequestedOutput, RequestHead
from rocserve.core.responses import InferResponse
from rocserve.core.sequences import SequenceTag
from rocserve.core.statistics import ModelStatistics
from rocserve.core.tensors import Tensor
from rocserve.core.validation import RequestValidator
from rocserve.scheduling.response_cache import (
    LARGEST_CACHED,
    CachedAnswers,
    CachedResponse,
    ResponseCache,
    copied_response,
)
from rocserve.scheduling.served_version import ScheduledVersion


def entry(data: bytes) -> CachedResponse:
    response = InferResponse.of("m", "1", "id", [Tensor("Y", DataType.UINT8, (len(data),), memoryview(data))], {"a": 1})
    return copied_response(response)


def test_what_is_kept_is_a_copy() -> None:
    data = bytearray(b"abc")
    kept = copied_response(InferResponse.of("m", "1", "", [Tensor("Y", DataType.UINT8, (3,), memoryview(data))]))
    data[:] = b"xyz"
    assert kept.data[0] == b"abc"
    assert kept.nbytes > 3


def test_those_used_least_lately_go_first() -> None:
    size = entry(bytes(1000)).nbytes
    cache = ResponseCache(3 * size)
    for key in (b"1", b"2", b"3"):
        assert cache.put("m", key, entry(bytes(1000)))
    assert cache.get("m", b"1") is not None
    assert cache.put("m", b"4", entry(bytes(1000)))
    assert cache.get("m", b"2") is None
    assert all(cache.get("m", key) is not None for key in (b"1", b"3", b"4"))
    assert cache.nbytes == 3 * size


def test_what_is_larger_than_the_cache_is_not_kept() -> None:
    cache = ResponseCache(2000)
    assert cache.put("m", b"1", entry(b"small"))
    assert not cache.put("m", b"2", entry(bytes(5000)))
    assert cache.get("m", b"1") is not None
    assert cache.get("m", b"2") is None


def test_the_same_key_again_takes_the_place_of_the_first() -> None:
    cache = ResponseCache(10_000)
    cache.put("m", b"1", entry(bytes(1000)))
    cache.put("m", b"1", entry(b"new"))
    kept = cache.get("m", b"1")
    assert kept is not None
    assert kept.data[0] == b"new"
    assert cache.nbytes == entry(b"new").nbytes


def test_owners_do_not_see_each_other_and_may_go() -> None:
    cache = ResponseCache(10_000)
    cache.put("a", b"1", entry(b"of a"))
    cache.put("b", b"1", entry(b"of b"))
    kept = cache.get("a", b"1")
    assert kept is not None
    assert kept.data[0] == b"of a"
    cache.forget("a")
    assert cache.get("a", b"1") is None
    assert cache.get("b", b"1") is not None
    assert cache.nbytes == entry(b"of b").nbytes


HEAD = RequestHead("m", "", (InputHead("IN", "FP32", (1, 2)),))


@pytest.fixture
def ask(make_bench, request):
    """Ask for a value; return the answer, and the executions that the test finishes."""
    policy = QueuePolicy(default_timeout_microseconds=getattr(request, "param", 0))
    bench = make_bench(DynamicBatching(preserve_ordering=True, default_queue_policy=policy), max_batch_size=1)
    answers = CachedAnswers(ResponseCache(1 << 20), bench.config, bench.statistics, logging.getLogger("test"))
    version = ScheduledVersion(bench.config, b"", 1, bench.statistics, bench.scheduler.inner, answers)
    answer_kind = type(bench.submit(0.0))
    bench.executions.pop().finish()

    def submit(value: float):
        answer = answer_kind(bench.loop, bench.answered)
        bench.loop.turning(version.infer)(
            InferRequest(HEAD, str(value), [np.full((1, 2), value, np.float32).tobytes()]), Exchange(answer)
        )
        return answer

    submit.bench = bench
    return submit


def test_what_the_cache_has_waits_for_what_came_before(ask) -> None:
    executions = ask.bench.executions
    first = ask(1.0)
    executions[0].finish()
    assert first.response is not None
    other, again = ask(2.0), ask(1.0)
    assert not again.done.is_set()
    executions[1].finish()
    assert ask.bench.answered[-2:] == [other, again]
    assert [other.number, again.number] == [4.0, 2.0]
    assert len(executions) == 2


@pytest.mark.parametrize("ask", [20_000], indirect=True)
def test_what_is_refused_waits_for_nobody(ask) -> None:
    running, refused = ask(1.0), ask(2.0)
    assert refused.done.wait(PATIENCE_SECONDS)
    assert refused.error.text == "Request timeout expired"
    assert not running.done.is_set()
    ask.bench.executions[0].finish()
    assert running.response is not None


DATA = (np.float32([1, 2]).tobytes(), np.float32([3]).tobytes())
INPUTS = (InputHead("A", "FP32", (1, 2)), InputHead("B", "FP32", (1, 1)))
ORIGINAL = (RequestHead("m", "", INPUTS, (), {"of": "ann", "as": "text"}), "", DATA, None)
"""Head, id, data and sequence of a request."""


def variant(**changes: object) -> tuple:
    """The original request with changes, by the names of RequestHead's fields, or `id`, `data` and `sequence`."""
    others = {"id": "", "data": DATA, "sequence": None}
    own = {name: changes.pop(name, default) for name, default in others.items()}
    return (replace(ORIGINAL[0], **changes), *own.values())


ALWAYS = {
    "other data": variant(data=(DATA[0], np.float32([4]).tobytes())),
    "one output": variant(outputs=(RequestedOutput("Y"),)),
    "classes": variant(outputs=(RequestedOutput("Y", {"classification": 1}), RequestedOutput("Z"))),
    "more classes": variant(outputs=(RequestedOutput("Y", {"classification": 2}), RequestedOutput("Z"))),
}
TO_MODELS_THAT_SEE_REQUESTS = {
    "no parameters": variant(parameters={}),
    "other parameters": variant(parameters={"of": "bob"}),
    "more parameters": variant(parameters={"of": "ann", "factor": 1}),
    "a parameter of another type": variant(parameters={"of": "ann", "factor": True}),
    "a parameter of a third type": variant(parameters={"of": "ann", "factor": 1.0}),
    "a parameter that is a text": variant(parameters={"of": "ann", "factor": "1"}),
    "priority": variant(parameters={"of": "ann", "priority": 1}),
    "timeout": variant(parameters={"of": "ann", "timeout": 1_000_000}),
    "id": variant(id="ann"),
    "another id": variant(id="bob"),
    "sequence": variant(sequence=SequenceTag(1)),
    "sequence of a text": variant(sequence=SequenceTag("1")),
    "start": variant(sequence=SequenceTag(1, starts=True)),
    "end": variant(sequence=SequenceTag(1, ends=True)),
    "inputs in another order": variant(inputs=ORIGINAL[0].inputs[::-1], data=DATA[::-1]),
}
NEVER = {
    "parameters in another order": variant(parameters={"as": "text", "of": "ann"}),
    "the request for an empty last response": variant(
        parameters={"of": "ann", "as": "text", "triton_enable_empty_final_response": True}
    ),
}


@pytest.mark.parametrize("sees_requests", [False, True], ids=["a model that sees tensors", "one that sees requests"])
def test_requests_are_equal_if_the_model_cannot_distinguish_them(sees_requests: bool) -> None:
    config = ModelConfig(
        name="m",
        max_batch_size=1,
        inputs=(InputConfig("A", DataType.FP32, (2,)), InputConfig("B", DataType.FP32, (1,))),
        outputs=(OutputConfig("Y", DataType.FP32, (2,)), OutputConfig("Z", DataType.FP32, (2,))),
    )
    validator = RequestValidator(config, sees_requests)
    answers = CachedAnswers(ResponseCache(1 << 20), config, ModelStatistics(), logging.getLogger("test"))
    sent: dict[str, str] = {}

    class Asked:
        """A client that notes which request's answer it got."""

        def __init__(self, name: str) -> None:
            self.name = name

        def send(self, answer: InferResponse, final: bool = True) -> None:
            sent[self.name] = answer.parameters["for"]

    distinguished = {**ALWAYS, **(TO_MODELS_THAT_SEE_REQUESTS if sees_requests else {})}
    others = {**NEVER, **({} if sees_requests else TO_MODELS_THAT_SEE_REQUESTS)}
    asked = {"original": ORIGINAL, **distinguished, **others, "again": ORIGINAL}
    for name, (head, identity, data, sequence) in asked.items():
        request = InferRequest(head, identity, data, sequence=sequence)
        validator.validate(request)
        exchange = Exchange(Asked(name))
        cached = answers.look_up(request, exchange, sees_requests)
        exchange.send(cached or InferResponse.of("m", "1", identity, [], {"for": name}))
    assert sent == {
        "original": "original",
        **{name: name for name in distinguished},
        **dict.fromkeys(others, "original"),
        "again": "original",
    }


def test_what_would_take_long_to_go_through_is_not_cached(caplog) -> None:
    config = ModelConfig(name="m")
    cache = ResponseCache(1 << 30)
    answers = CachedAnswers(cache, config, ModelStatistics(), logging.getLogger("test"))
    large = bytes(LARGEST_CACHED + 1)
    request, exchange = InferRequest(HEAD, "", [large]), Exchange(Nobody())
    request.nbytes = len(large)
    assert answers.look_up(request, exchange, False) is None
    assert not exchange.hooks
    response = InferResponse.of("m", "1", "", [Tensor("OUT", DataType.UINT8, (len(large),), large)])
    answers.keep(object(), b"key", response, 0)
    assert cache.nbytes == 0
    assert "one response may have at most 33554432 bytes" in caplog.text
