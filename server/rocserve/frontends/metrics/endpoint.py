"""GET /metrics, on a port of its own."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Mapping
from types import MappingProxyType

from rocserve.frontends.http.listener import HttpListener
from rocserve.frontends.http.protocol import ConnectionLimits, Request, Response
from rocserve.frontends.metrics.exposition import CONTENT_TYPE

_PATH = "/metrics"
MOST_CONNECTIONS = 64
"""Monitoring asks a few times a minute."""


class MetricsEndpoint:
    """All calls are made on the loop; the text is written on another thread."""

    def __init__(
        self,
        address: str,
        port: int,
        write_metrics: Callable[[], str],
        limits: ConnectionLimits,
        log: logging.Logger,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._address = address
        self._port = port
        self._write_metrics = write_metrics
        self._log = log
        self._listener = HttpListener(lambda request: request.run(self._answer(request)), log, limits, tls)

    async def start(self) -> int:
        """Listen; returns the port.

        Raises:
            OSError: it cannot be listened on; the error's text says where and what to do.
        """
        return await self._listener.start("metrics", "metrics", self._address, self._port)

    async def stop(self) -> None:
        await self._listener.stop()

    async def _answer(self, request: Request) -> Response:
        if request.path.rstrip("/") != _PATH:
            return _text(404, f"there is only {_PATH}\n")
        if request.method not in ("GET", "HEAD"):
            return _text(405, "only GET and HEAD\n", {"Allow": "GET, HEAD"})
        try:
            return _text(200, await asyncio.to_thread(self._write_metrics))
        except Exception:
            self._log.exception("the metrics could not be written")
            return _text(500, "the server's log says why\n")


def _text(status: int, text: str, headers: Mapping[str, str] = MappingProxyType({})) -> Response:
    return Response(status, text.encode(), CONTENT_TYPE, headers)
