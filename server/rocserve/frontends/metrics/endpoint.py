"""Serves GET /metrics on a separate port."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Mapping
from types import MappingProxyType

from rocserve.frontends.http.connection import ConnectionLimits
from rocserve.frontends.http.listener import HttpListener
from rocserve.frontends.http.request import Request, Response

MOST_CONNECTIONS = 64
"""Monitoring reads the metrics a few times a minute."""


def metrics_listener(
    write_metrics: Callable[[], str],
    limits: ConnectionLimits,
    log: logging.Logger,
    tls: ssl.SSLContext | None = None,
) -> HttpListener:
    """Return a listener that serves the text of `write_metrics`, which is called on another thread."""

    async def answer(request: Request) -> Response:
        if request.head.path.rstrip("/") != "/metrics":
            return _text(404, "not found; this port serves only /metrics\n")
        if request.head.method not in ("GET", "HEAD"):
            return _text(405, "only GET and HEAD\n", {"Allow": "GET, HEAD"})
        return _text(200, await asyncio.to_thread(write_metrics))

    def failure(request: Request, error: Exception) -> Response:
        log.error("cannot write the metrics", exc_info=error)
        return _text(500, "the server's log says why\n")

    return HttpListener(lambda request: request.run(answer(request)), log, limits, tls, failure)


def _text(status: int, text: str, headers: Mapping[str, str] = MappingProxyType({})) -> Response:
    return Response(status, text.encode(), "text/plain; version=0.0.4; charset=utf-8", headers)
