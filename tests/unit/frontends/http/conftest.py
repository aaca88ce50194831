"""Listeners, and connections of clients; all end with the test."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from rocserve.frontends.http.listener import HttpListener
from rocserve.frontends.listen_address import ListenAddress

LOG = logging.getLogger("test")

Listen = Callable[[HttpListener], Awaitable[int]]
Connect = Callable[..., Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@pytest.fixture
async def listen() -> AsyncIterator[Listen]:
    """Starts a listener, and returns its port."""
    listeners: list[HttpListener] = []

    async def start(listener: HttpListener) -> int:
        listeners.append(listener)
        return await listener.start(ListenAddress("HTTP", "http", "127.0.0.1", 0))

    yield start
    for listener in listeners:
        await listener.stop(0)


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Connects a client to a port, and sends bytes."""
    writers: list[asyncio.StreamWriter] = []

    async def open_connection(
        port: int, sent: bytes = b"", tls: ssl.SSLContext | None = None, limit: int = 1 << 16
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls, limit=limit)
        writers.append(writer)
        writer.write(sent)
        return reader, writer

    yield open_connection
    for writer in writers:
        writer.close()
