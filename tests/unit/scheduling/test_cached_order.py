"""The response cache of a model that answers in the order of arrival."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from rocserve.core.datatypes import DataType
from rocserve.core.model_config import DynamicBatching, ModelConfig, QueuePolicy
from rocserve.core.requests import InferRequest, InferResponse, InputHead, RequestHead
from rocserve.core.statistics import ModelStatistics
from rocserve.core.tensors import Tensor
from rocserve.scheduling.response_cache import LARGEST_CACHED, CachedAnswers, ResponseCache
from rocserve.scheduling.served_version import ScheduledVersion

HEAD = RequestHead("m", "", (InputHead("IN", "FP32", (1, 2)),))


@pytest.fixture
def ask(make_bench, request):
    """Ask for a value; gives the answer, and the executions that the test finishes."""
    policy = QueuePolicy(default_timeout_microseconds=getattr(request, "param", 0))
    bench = make_bench(DynamicBatching(preserve_ordering=True, default_queue_policy=policy), max_batch_size=1)
    answers = CachedAnswers(ResponseCache(1 << 20), bench.config, 1, bench.statistics, logging.getLogger("test"))
    version = ScheduledVersion(bench.config, b"", 1, bench.statistics, bench.scheduler.inner, answers)
    answer_kind = type(bench.submit(0.0))
    bench.executions.pop().finish()

    def submit(value: float):
        answer = answer_kind(bench.loop, bench.answered)
        bench.loop.turning(version.infer)(
            InferRequest(HEAD, str(value), [np.full((1, 2), value, np.float32).tobytes()]), answer
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
    assert [np.frombuffer(each.response.outputs[0].data, np.float32)[0] for each in (other, again)] == [4.0, 2.0]
    assert len(executions) == 2


@pytest.mark.parametrize("ask", [20_000], indirect=True)
def test_what_is_refused_waits_for_nobody(ask) -> None:
    running, refused = ask(1.0), ask(2.0)
    assert refused.done.wait(5)
    assert refused.error.text == "Request timeout expired"
    assert not running.done.is_set()
    ask.bench.executions[0].finish()
    assert running.response is not None


def test_what_would_take_long_to_go_through_is_not_cached(caplog) -> None:
    config = ModelConfig(name="m")
    cache = ResponseCache(1 << 30)
    answers = CachedAnswers(cache, config, 1, ModelStatistics(), logging.getLogger("test"))
    large = bytes(LARGEST_CACHED + 1)
    request, responder = InferRequest(HEAD, "", [large]), object()
    request.nbytes = len(large)
    assert answers.look_up(request, responder) is responder
    answers.keep(b"key", InferResponse.of("m", "1", "", [Tensor("OUT", DataType.UINT8, (len(large),), large)]), 0)
    assert cache.nbytes == 0
    assert "one response has 33554432 bytes at most" in caplog.text
