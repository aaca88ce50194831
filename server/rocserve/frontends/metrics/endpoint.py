"""GET /metrics over HTTP/1.1. One answer a connection: monitoring asks a few times a minute."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Callable
from http import HTTPStatus

from rocserve.frontends.metrics.exposition import CONTENT_TYPE

_PATH = "/metrics"
_HEAD_SECONDS = 10.0
_WRITE_SECONDS = 30.0
_LONGEST_HEAD = 16 * 1024
_MOST_CONNECTIONS = 64


class MetricsEndpoint:
    """All calls are made on the loop; the text is written on another thread."""

    def __init__(self, address: str, port: int, write_metrics: Callable[[], str], log: logging.Logger) -> None:
        self._address = address
        self._port = port
        self._write_metrics = write_metrics
        self._log = log
        self._server: asyncio.Server | None = None
        self._connections = 0

    async def start(self) -> int:
        """Listen; returns the port.

        Raises:
            OSError: it cannot be listened on; the error's text says where and what to do.
        """
        try:
            self._server = await asyncio.start_server(
                self._serve, self._address, self._port, limit=_LONGEST_HEAD, reuse_address=True
            )
        except OSError as error:
            raise OSError(error.errno, _refusal(self._address, self._port, error)) from None
        return int(self._server.sockets[0].getsockname()[1])

    def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            if self._connections <= _MOST_CONNECTIONS:
                await self._answer(reader, writer)
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError):
            pass  # Whoever asked has gone, or never did.
        except asyncio.LimitOverrunError:
            writer.write(_response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, ""))
        finally:
            self._connections -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(_HEAD_SECONDS):
            head = await reader.readuntil(b"\r\n\r\n")
        response = await self._response_to(head.split(b"\r\n", 1)[0].decode("latin-1"))
        writer.write(response)
        async with asyncio.timeout(_WRITE_SECONDS):
            await writer.drain()

    async def _response_to(self, request_line: str) -> bytes:
        words = request_line.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _response(HTTPStatus.BAD_REQUEST, "this is HTTP/1.1\n")
        method, target, _ = words
        if target.partition("?")[0] != _PATH:
            return _response(HTTPStatus.NOT_FOUND, f"there is only {_PATH}\n")
        if method not in ("GET", "HEAD"):
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD\n", "Allow: GET, HEAD\r\n")
        try:
            text = await asyncio.to_thread(self._write_metrics)
        except Exception:
            self._log.exception("the metrics could not be written")
            return _response(HTTPStatus.INTERNAL_SERVER_ERROR, "the server's log says why\n")
        return _response(HTTPStatus.OK, text, with_body=method == "GET")


def _response(status: HTTPStatus, text: str, more: str = "", with_body: bool = True) -> bytes:
    body = text.encode()
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\n"
        f"Content-Type: {CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\n{more}Connection: close\r\n\r\n"
    )
    return head.encode() + (body if with_body else b"")


def _refusal(address: str, port: int, error: OSError) -> str:
    why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
    remedy = "name another with --metrics-port, or switch metrics off with --allow-metrics=false"
    if error.errno in (errno.EADDRNOTAVAIL, None) or (error.errno and error.errno < 0):
        remedy = "name an address of this machine with --metrics-address"
    return f"cannot serve metrics at {address}:{port}: {why}; {remedy}"
