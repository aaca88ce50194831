"""A collector of OpenTelemetry's spans, OTLP over HTTP, on loopback."""

from __future__ import annotations

import asyncio
import gzip
import threading
from types import TracebackType
from typing import Self

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from support.server import wait_until


class Collector:
    """A context manager; `spans` has all that has come."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resource: dict[str, str] = {}
        self.batches: list[int] = []
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/traces", self._take)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1/traces"

    async def _take(self, request: web.Request) -> web.Response:
        body = await request.read()
        if request.headers.get("Content-Encoding") == "gzip" and body[:2] == b"\x1f\x8b":
            body = gzip.decompress(body)
        message = ExportTraceServiceRequest.FromString(body)
        spans = [span for resource in message.resource_spans for scope in resource.scope_spans for span in scope.spans]
        for resource in message.resource_spans:
            self.resource = {entry.key: entry.value.string_value for entry in resource.resource.attributes}
        self.spans += spans
        self.batches.append(len(spans))
        return web.Response(
            body=ExportTraceServiceResponse().SerializeToString(), content_type="application/x-protobuf"
        )

    def wait_for(self, count: int) -> list[Span]:
        wait_until(lambda: len(self.spans) >= count, what=f"{count} spans, there are {len(self.spans)}")
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
