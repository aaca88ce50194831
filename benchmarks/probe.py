"""Checks that a server's answers are right, which h2load does not: it sees HTTP status 200 even for a gRPC error.

Three checks together show it: the bytes that h2load sends are sent before and after, and the answer is compared with
the expected one; the server's own counts of successes and failures during the run; and the size of the answers, because
an error has no body. The last two do not cover requests that were in flight when h2load stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import grpc
import numpy
from numpy.typing import NDArray
from tritonclient.grpc import InferResult, service_pb2, service_pb2_grpc

from benchmarks.http_request import HttpRequest, HttpRequestFailed
from benchmarks.load_generator import FRAME_HEADER, INFER_PATH, Load, LoadResult
from benchmarks.server_process import MESSAGE_BYTES
from benchmarks.shared_region import SharedRegion

STATISTICS_SECONDS = 2.0
"""Seconds within which a server counts an answer that it has sent."""
CALL_SECONDS = 30.0

Outputs = Mapping[str, NDArray[numpy.generic]]


class WrongAnswer(RuntimeError):
    """A server failed a request, or answered it wrongly."""


@dataclass(frozen=True, slots=True)
class Counts:
    """A model's requests since it was loaded, by the statistics RPC."""

    succeeded: int
    failed: int


class Probe:
    """A client of one server, as a context manager."""

    def __init__(self, name: str, address: str) -> None:
        self._name = name
        limits = [("grpc.max_receive_message_length", MESSAGE_BYTES), ("grpc.max_send_message_length", MESSAGE_BYTES)]
        self._channel = grpc.insecure_channel(address, options=limits)
        self._service = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._send = self._channel.unary_unary(INFER_PATH, request_serializer=None, response_deserializer=None)

    def close(self) -> None:
        self._channel.close()

    def answer(self, message: bytes, check: Callable[[Outputs], None]) -> int:
        """Send one ModelInferRequest unchanged and check the outputs; return the size of the framed answer. Raises
        WrongAnswer if the call or the check fails."""
        try:
            raw: bytes = self._send(message, timeout=CALL_SECONDS)
        except grpc.RpcError as error:
            raise WrongAnswer(f"{self._name}: {error.code().name}: {error.details()}") from error
        check_answer(self._name, check, _outputs(InferResult(service_pb2.ModelInferResponse.FromString(raw))))
        return FRAME_HEADER.size + len(raw)

    def register(self, region: SharedRegion) -> None:
        """Register a shared memory region with the server, once."""
        self._service.SystemSharedMemoryUnregister(
            service_pb2.SystemSharedMemoryUnregisterRequest(name=region.name), timeout=CALL_SECONDS
        )
        request = service_pb2.SystemSharedMemoryRegisterRequest(
            name=region.name, key=region.key, byte_size=region.nbytes
        )
        self._service.SystemSharedMemoryRegister(request, timeout=CALL_SECONDS)

    def has_dynamic_batching(self, model: str) -> bool:
        """Whether the effective configuration of a model has dynamic batching."""
        request = service_pb2.ModelConfigRequest(name=model)
        response = self._service.ModelConfig(request, timeout=CALL_SECONDS)
        return bool(response.config.HasField("dynamic_batching"))

    def counts(self, model: str) -> Counts:
        request = service_pb2.ModelStatisticsRequest(name=model)
        response = self._service.ModelStatistics(request, timeout=CALL_SECONDS)
        versions = [entry.inference_stats for entry in response.model_stats]
        return Counts(
            succeeded=sum(version.success.count for version in versions),
            failed=sum(version.fail.count for version in versions),
        )

    def check_run(self, model: str, before: Counts, load: Load, result: LoadResult, answer_bytes: int) -> None:
        """Raise WrongAnswer unless the counts and bytes of a run show that its requests succeeded. `answer_bytes`: the
        size of one framed answer."""
        done = result.report.succeeded
        deadline = time.monotonic() + STATISTICS_SECONDS
        while (now := self.counts(model)).succeeded - before.succeeded < done and time.monotonic() < deadline:
            time.sleep(0.05)
        problem = run_problem(
            succeeded=now.succeeded - before.succeeded,
            failed=now.failed - before.failed,
            body_bytes=result.report.body_bytes,
            done=done,
            in_flight=load.in_flight,
            answer_bytes=answer_bytes,
        )
        if problem:
            raise WrongAnswer(f"{self._name}, model {model}: {problem}")


def answer_over_http(name: str, address: str, request: HttpRequest, check: Callable[[Outputs], None]) -> int:
    """As `Probe.answer`, at the HTTP port of the server `name`; returns the size of the answer's body."""
    try:
        outputs, nbytes = request.send(address)
    except (HttpRequestFailed, OSError) as error:
        raise WrongAnswer(f"{name}: {error}") from error
    check_answer(name, check, outputs)
    return nbytes


def check_answer(name: str, check: Callable[[Outputs], None], outputs: Outputs) -> None:
    """Raise WrongAnswer if the outputs of the server `name` fail the `check`."""
    try:
        check(outputs)
    except (AssertionError, KeyError) as error:
        raise WrongAnswer(f"{name} answered wrongly: {error}") from error


def _outputs(result: InferResult) -> Outputs:
    """Outputs by name; those in shared memory are empty."""
    response = result.get_response()
    return {
        output.name: result.as_numpy(output.name) if raw else numpy.empty(0)
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    }


def run_problem(succeeded: int, failed: int, body_bytes: int, done: int, in_flight: int, answer_bytes: int) -> str:
    """What contradicts that `done` requests succeeded, or "". `succeeded` and `failed` are the server's counts. Up to
    `in_flight` requests that h2load left when it stopped may count either way, and may have brought a part of their
    answer."""
    if succeeded < done:
        return f"h2load had {done} answers, but the server counts {succeeded} successes"
    if failed > in_flight:
        return f"the server counts {failed} failures, and only {in_flight} requests were cut off at the end"
    least, most = done * answer_bytes, (done + in_flight) * answer_bytes
    if not least <= body_bytes <= most:
        return f"the answers had {body_bytes} bytes, but {done} of {answer_bytes} bytes give {least} to {most}"
    return ""
