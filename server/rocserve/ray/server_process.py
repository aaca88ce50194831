"""A rocserve server as the child of a process, with ports that nobody else gets."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from http import HTTPStatus
from typing import Self

import aiohttp

_CHILD = """
import sys
from rocserve.cli import main
from rocserve.core.exit_with_parent import exit_with_parent
kept = exit_with_parent(int(sys.argv[1]))
sys.exit(main(sys.argv[2:]))
"""
_LOOPBACK = "127.0.0.1"
_POLL_SECONDS = 0.05
"""Between two questions whether a server that starts is ready."""
_PENDING = "nv_inference_pending_request_count{"


class ServerFailed(Exception):
    """The server has ended, or cannot serve."""


class ServerProcess:
    """A server that ends with the process that started it, however that ends."""

    def __init__(
        self, process: asyncio.subprocess.Process, reserved: Sequence[socket.socket], parent_pipe_writer: int
    ) -> None:
        self.pid = process.pid
        self._process = process
        self._reserved = reserved
        self._parent_pipe_writer = parent_pipe_writer
        self.grpc, self.http, self._metrics = (f"{_LOOPBACK}:{held.getsockname()[1]}" for held in reserved)
        # Bodies pass as they are, compressed or not; Serve bounds how many there are.
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), auto_decompress=False, timeout=aiohttp.ClientTimeout(total=None)
        )

    @classmethod
    async def start(cls, words: Sequence[str]) -> Self:
        """Start `rocserve serve` with these words, and wait until it is ready. Raises: ServerFailed: it ended
        instead."""
        reserved = [_reserved_port() for _ in range(3)]
        reader, writer = os.pipe()
        where = [
            f"--{protocol}-{part}"
            for protocol, held in zip(("grpc", "http", "metrics"), reserved, strict=True)
            for part in (f"address={_LOOPBACK}", f"port={held.getsockname()[1]}")
        ]
        # A replica has one connection, which one process serves; words that follow may say otherwise.
        command = ["serve", "--front-ends=0", *words, *where, "--reuse-grpc-port", "--reuse-http-port"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _CHILD, str(reader), *command, pass_fds=(reader,), start_new_session=True
        )
        os.close(reader)
        server = cls(process, reserved, writer)
        while not await server._is_ready():
            if process.returncode is not None:
                await server.end()
                raise ServerFailed(
                    f"rocserve {' '.join(command)} ended with status {process.returncode} before it was ready;"
                    " the last lines in this replica's worker-*.err say why"
                )
            await asyncio.sleep(_POLL_SECONDS)
        return server

    async def check(self) -> None:
        """Raises: ServerFailed, it is not ready."""
        if self._process.returncode is not None:
            raise ServerFailed(f"the server has ended with status {self._process.returncode}")
        if not await self._is_ready():
            raise ServerFailed("the server is not ready: /v2/repository/index says which model, and why")

    async def pending_requests(self) -> float:
        """How many requests wait for an instance of their model, of all models."""
        async with self.session.get(f"http://{self._metrics}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(_PENDING))

    async def end(self) -> None:
        """SIGTERM, and wait until it has finished the work in flight; --exit-timeout-secs bounds that."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
            await self._process.wait()
        await self.session.close()
        os.close(self._parent_pipe_writer)
        for held in self._reserved:
            held.close()

    async def _is_ready(self) -> bool:
        try:
            async with self.session.get(f"http://{self.http}/v2/health/ready") as answer:
                return bool(answer.status == HTTPStatus.OK)
        except aiohttp.ClientConnectionError:
            return False


def _reserved_port() -> socket.socket:
    """A port that no one gets who does not ask for this one: bound, and nobody listens on it here."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind((_LOOPBACK, 0))
    return held
