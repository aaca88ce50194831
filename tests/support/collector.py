"""A collector of OpenTelemetry spans: OTLP over HTTP, on loopback."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from support.waiting import PATIENCE_SECONDS, wait_until


class Collector:
    """A context manager that collects spans; `spans` holds all that have arrived."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resource: dict[str, str] = {}
        self.batches: list[int] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector._take(body)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *arguments: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join(PATIENCE_SECONDS)
        self._server.server_close()

    def _take(self, body: bytes) -> None:
        message = ExportTraceServiceRequest.FromString(body)
        spans = [span for resource in message.resource_spans for scope in resource.scope_spans for span in scope.spans]
        for resource in message.resource_spans:
            self.resource = {entry.key: entry.value.string_value for entry in resource.resource.attributes}
        self.spans += spans
        self.batches.append(len(spans))

    def wait_for(self, count: int) -> list[Span]:
        wait_until(lambda: len(self.spans) >= count, f"{count} spans, there are {len(self.spans)}")
        return self.spans


def events(span: Span) -> list[str]:
    return [event.name for event in span.events]


def attributes(span: Span) -> dict[str, str | int]:
    return {
        entry.key: entry.value.string_value
        if entry.value.WhichOneof("value") == "string_value"
        else entry.value.int_value
        for entry in span.attributes
    }
