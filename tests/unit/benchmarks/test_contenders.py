"""The load generator and the probe together, against a small gRPC server that can fail."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import numpy
import pytest
from support.measuring import measured
from tritonclient.grpc import service_pb2, service_pb2_grpc

from benchmarks.cases import add_sub_cases
from benchmarks.contenders import ServedContender
from benchmarks.probe import WrongAnswer
from benchmarks.server_process import ServerProcess

pytestmark = [
    pytest.mark.skipif(shutil.which("h2load") is None, reason="h2load (nghttp2-client) is not installed"),
    pytest.mark.long,
]

CASE = add_sub_cases("add_sub")[1]


class AddSubServer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Adds and subtracts. `fails`: whether it answers a request with a gRPC error, by the number of the request among
    those of h2load or among the others, and whether it is h2load's."""

    def __init__(self) -> None:
        self.fails: Callable[[int, bool], bool] = lambda number, by_h2load: False
        self.wrong = False
        self._numbers = {True: count(), False: count()}
        self._succeeded = count()

    def ModelConfig(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return service_pb2.ModelConfigResponse()

    def ModelStatistics(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        response = service_pb2.ModelStatisticsResponse()
        statistics = response.model_stats.add(name=request.name, version="1").inference_stats
        succeeded = next(self._succeeded)
        self._succeeded = count(succeeded)
        statistics.success.count = succeeded
        return response

    def ModelInfer(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        by_h2load = dict(context.invocation_metadata()).get("user-agent", "").startswith("h2load")
        if self.fails(next(self._numbers[by_h2load]), by_h2load):
            context.abort(grpc.StatusCode.UNAVAILABLE, "the worker is gone")
        left, right = (numpy.frombuffer(raw, numpy.int32) for raw in request.raw_input_contents)
        response = service_pb2.ModelInferResponse(model_name=request.model_name, model_version="1")
        for name, array in (("OUTPUT0", left + right + self.wrong), ("OUTPUT1", left - right)):
            response.outputs.add(name=name, datatype="INT32", shape=[1, 16])
            response.raw_output_contents.append(array.tobytes())
        next(self._succeeded)
        return response


@pytest.fixture
def servicer() -> AddSubServer:
    return AddSubServer()


@pytest.fixture
def contender(servicer: AddSubServer, tmp_path: Path) -> Iterator[ServedContender]:
    server = grpc.server(ThreadPoolExecutor(2))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    contender = ServedContender(ServerProcess("small", [], port, tmp_path / "log"), tmp_path)
    yield contender
    contender.close()
    server.stop(None).wait()


def test_a_server_that_answers_is_measured(contender: ServedContender) -> None:
    contender.prepare(CASE)
    measurement = measured(contender, CASE)
    assert measurement.rate > 0
    assert measurement.p50 is not None and measurement.p99 is not None
    assert 0 < measurement.p50 <= measurement.p99


def test_errors_in_the_middle_of_a_run_are_seen(contender: ServedContender, servicer: AddSubServer) -> None:
    servicer.fails = lambda number, by_h2load: by_h2load and number > 0
    with pytest.raises(WrongAnswer, match="successes"):
        while True:  # On a busy machine a run may be over after its first request.
            measured(contender, CASE)


def test_an_error_at_the_first_request_is_raised_with_its_text(
    contender: ServedContender, servicer: AddSubServer
) -> None:
    servicer.fails = lambda number, by_h2load: True
    with pytest.raises(WrongAnswer, match="UNAVAILABLE: the worker is gone"):
        contender.measure(CASE, seconds=0.5)


def test_a_wrong_sum_is_seen(contender: ServedContender, servicer: AddSubServer) -> None:
    servicer.wrong = True
    with pytest.raises(WrongAnswer, match="answered wrongly"):
        contender.measure(CASE, seconds=0.5)


def test_batching_where_there_must_be_none_is_seen(contender: ServedContender) -> None:
    batched = next(case for case in add_sub_cases("add_sub") if case.dynamic_batching)
    with pytest.raises(WrongAnswer, match="dynamic batching on"):
        contender.prepare(batched)
