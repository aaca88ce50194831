"""GET /metrics, on a port of its own."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable

from aiohttp import web

from rocserve.frontends.http.connection import ConnectionLimits
from rocserve.frontends.http.listener import HttpListener, binding_refusal
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
        self._listener = HttpListener(self._answer, log, limits, tls)

    async def start(self) -> int:
        """Listen; returns the port.

        Raises:
            OSError: it cannot be listened on; the error's text says where and what to do.
        """
        try:
            return await self._listener.start(self._address, self._port)
        except OSError as error:
            raise binding_refusal("metrics", self._address, self._port, error, "metrics") from None

    async def stop(self) -> None:
        await self._listener.stop()

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        if request.rel_url.raw_path.rstrip("/") != _PATH:
            return _text(404, f"there is only {_PATH}\n")
        if request.method not in ("GET", "HEAD"):
            response = _text(405, "only GET and HEAD\n")
            response.headers["Allow"] = "GET, HEAD"
            return response
        try:
            return _text(200, await asyncio.to_thread(self._write_metrics))
        except Exception:
            self._log.exception("the metrics could not be written")
            return _text(500, "the server's log says why\n")


def _text(status: int, text: str) -> web.Response:
    return web.Response(status=status, body=text.encode(), headers={"Content-Type": CONTENT_TYPE})
