"""grpc.health.v1: Check and Watch, for the server and for each model by name."""

from __future__ import annotations

from collections.abc import Callable

from rocserve.core.errors import StatusCode, not_found
from rocserve.core.serving import ServingTableHolder
from rocserve.frontends.grpc.transport import SERVER_EXITING, StreamCall
from rocserve.protocol import health_pb2 as pb
from rocserve.protocol.faults import parse_message
from rocserve.services.readiness import Readiness

SERVER_SERVICES = ("", "inference.GRPCInferenceService", "grpc.health.v1.Health")


class HealthHandlers:
    """The service "" is the server; any other name that is not one of our services is a model's. On the data plane's
    thread."""

    def __init__(self, tables: ServingTableHolder, readiness: Readiness) -> None:
        self._tables = tables
        self._readiness = readiness
        self._watches: set[HealthWatch] = set()

    def check(self, message: bytes) -> bytes:
        service = parse_message(message, pb.HealthCheckRequest).service
        status = self.status(service)
        if status == pb.HealthCheckResponse.SERVICE_UNKNOWN:
            raise not_found(f"unknown service '{service}': neither a service of this server nor a model")
        return pb.HealthCheckResponse(status=status).SerializeToString()

    def watch(self, call: StreamCall) -> HealthWatch:
        watch = HealthWatch(call, self.status, self._watches.discard)
        self._watches.add(watch)
        return watch

    def status(self, service: str) -> pb.HealthCheckResponse.ServingStatus:
        if service in SERVER_SERVICES:
            serving = self._readiness.is_ready()
        else:
            model = self._tables.table.models.get(service)
            if model is None:
                return pb.HealthCheckResponse.SERVICE_UNKNOWN
            serving = model.latest is not None and not self._readiness.is_exiting
        return pb.HealthCheckResponse.SERVING if serving else pb.HealthCheckResponse.NOT_SERVING

    def publish(self) -> None:
        """Tell the watchers what changed."""
        for watch in list(self._watches):
            watch.send_change()

    def end(self) -> None:
        """End all watches: the server is going."""
        for watch in list(self._watches):
            watch.finish(StatusCode.UNAVAILABLE, SERVER_EXITING)


class HealthWatch:
    """One Watch call: a message for the state now, and one for each change of it."""

    def __init__(
        self,
        call: StreamCall,
        status: Callable[[str], pb.HealthCheckResponse.ServingStatus],
        on_end: Callable[[HealthWatch], None],
    ) -> None:
        self._call = call
        self._status = status
        self._on_end = on_end
        self._service: str | None = None
        self._last: int | None = None

    def on_message(self, message: bytes) -> None:
        self._service = parse_message(message, pb.HealthCheckRequest).service
        self.send_change()
        self._call.request_next()

    def on_half_close(self) -> None:
        if self._service is None:
            self.finish(StatusCode.INVALID_ARGUMENT, "expected one HealthCheckRequest, got none")

    def on_cancel(self) -> None:
        self._on_end(self)

    def send_change(self) -> None:
        if self._service is None:
            return
        status = self._status(self._service)
        if status != self._last:
            self._last = status
            self._call.send(pb.HealthCheckResponse(status=status).SerializeToString())

    def finish(self, code: StatusCode, text: str) -> None:
        self._call.finish(code, text)
        self._on_end(self)
