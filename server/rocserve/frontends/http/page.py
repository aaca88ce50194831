"""The page at /: its files, what it asks beside all others, and the events of the repository as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from importlib import resources
from typing import NamedTuple

from rocserve.core.errors import ServeError, unavailable
from rocserve.frontends.http.generate import EVENT_STREAM
from rocserve.frontends.http.json_text import json_bytes
from rocserve.frontends.http.request import JSON, Request, Response
from rocserve.protocol import page_pb2
from rocserve.protocol.json_form import plain_values
from rocserve.services.methods import Method

_FILES = "page_files"
_OPENAPI = "openapi.json"
_CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": JSON,
}
_HEADERS = {
    # Nothing of another origin, no script or style within the page, and no text that becomes markup.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src 'self' blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_MOST_STREAMS = 64
"""Of a process. They stay open, so that no other connection would be left in the end; the page does without, too."""


class PagePart(NamedTuple):
    answer: Callable[[Request], None]
    shows: tuple[str, ...] = ()
    """The methods whose answers are part of it: who may not ask them may not have it."""


class Page:
    """By paths its `parts`."""

    def __init__(self, methods: Mapping[str, Method]) -> None:
        """`methods`: as of services/methods.py."""
        self._methods = methods
        self._open_streams = 0
        self.parts = {
            "/v2/overview": PagePart(
                lambda request: request.run(self._overview()), ("RepositoryIndex", "ModelStatistics", "ModelMetadata")
            ),
            "/v2/events": PagePart(lambda request: request.run(self._send_events(request)), ("RepositoryIndex",)),
        }
        for file in (resources.files(__package__) / _FILES).iterdir():
            content_type = _CONTENT_TYPES["." + file.name.rpartition(".")[2]]
            path = {"index.html": "/", _OPENAPI: f"/{_OPENAPI}"}.get(file.name, f"/ui/{file.name}")
            response = Response(200, file.read_bytes(), content_type, _HEADERS)
            self.parts[path] = PagePart(partial(Request.respond, response=response))

    async def _overview(self) -> Response:
        """What all models do: of hundreds of them that takes a while to write, beside requests."""
        method = self._methods["Overview"]
        overview = await method.answer(page_pb2.OverviewRequest())
        return Response(200, await asyncio.to_thread(lambda: json_bytes(plain_values(overview))), JSON)

    async def _send_events(self, request: Request) -> Response | None:
        """What becomes of models as server-sent events, each with its number, until the client or the server ends.
        Raises: ServeError: too many are open."""
        if self._open_streams >= _MOST_STREAMS:
            raise unavailable(f"{_MOST_STREAMS} clients are sent events, as many as may be; ask /v2/overview")
        if request.head.method == "HEAD":
            return Response(200, b"", EVENT_STREAM)
        method = self._methods["RepositoryEvents"]
        number = request.head.headers.get("last-event-id", "")
        after = int(number) if number.isascii() and number.isdecimal() and len(number) < 19 else 0
        self._open_streams += 1
        try:
            request.begin_stream(200, EVENT_STREAM, {"Cache-Control": "no-cache"})
            while True:
                response = await method.answer(page_pb2.RepositoryEventsRequest(after=after))
                events = [
                    b"id: %d\ndata: %b\n\n" % (one.number, json_bytes(plain_values(one))) for one in response.events
                ]
                # A comment where there is none: a client that has gone is noticed.
                await request.send(b"".join(events) or b":\n\n")
                after = response.events[-1].number if response.events else after
                if response.is_last:
                    break
        except ServeError:
            pass  # The server has no room, or ends; the client asks again.
        finally:
            self._open_streams -= 1
        request.end_stream()
        return None
