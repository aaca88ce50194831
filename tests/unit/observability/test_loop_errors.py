"""Errors of the event loop that no caller receives are logged."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import socket

import pytest

from rocserve.observability.failures import LoopErrors

LOG = logging.getLogger("rocserve.test.loop")


async def test_connections_that_cannot_be_accepted_are_one_line(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    asyncio.get_running_loop().set_exception_handler(LoopErrors(LOG))
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    clients = [socket.socket() for _ in range(5)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.open("/dev/null", os.O_RDONLY)
    os.close(probe)
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe, hard))
    try:
        for client in clients:
            client.connect(server.sockets[0].getsockname())
        await asyncio.sleep(0.2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert caplog.messages == [
        "connections cannot be accepted: Too many open files; raise the hard limit of open files (ulimit -Hn,"
        " LimitNOFILE), or let fewer clients connect"
    ]
    # Errors that gRPC's core writes about other servers of this process do not count.
    written = capfd.readouterr().err
    assert "Traceback" not in written
    assert "out of system resource" not in written
    for client in clients:
        client.close()
    server.close()


async def test_what_nobody_awaits_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise ValueError("lost")

    asyncio.get_running_loop().set_exception_handler(LoopErrors(LOG))
    task = asyncio.ensure_future(fail())
    await asyncio.wait([task])
    del task
    gc.collect()
    assert caplog.messages == ["Task exception was never retrieved"]
    assert "ValueError: lost" in caplog.text
