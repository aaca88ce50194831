"""Parses large bodies in processes of their own: in this one they would keep the interpreter's lock for seconds.

Smaller ones take less time than the way there. A process is started when it is needed, serves one body at a time, and
ends when it has had none for a while; what it meets there (no memory, say) is one request's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.exit_with_parent import exit_with_parent
from rocserve.core.tensors import Buffer

LARGE_JSON = 256 << 10
"""Bytes; the worst of this size takes 30 ms."""
_MOST_PROCESSES = 2
"""Each may take some 30 times as much memory as the largest body."""
_IDLE_SECONDS = 60.0
_LEAST_APART = 64 << 10
"""Bytes of a tensor that is handed over beside what is said of it, so that it is not copied once more."""
_NICENESS = 10
"""Small requests go before."""
_LENGTHS = struct.Struct("<QQ")
"""Of what is said, and of the bytes behind it."""


class LargeBodies:
    """All calls are made on the loop."""

    def __init__(self, most_processes: int = _MOST_PROCESSES) -> None:
        self._places = asyncio.Semaphore(most_processes)
        self._idle: dict[_Process, asyncio.TimerHandle] = {}

    async def parse(self, function: Callable[[Buffer], Any], body: Buffer) -> Any:
        """What the function, which can be pickled, makes of the body. Where that has `data`, those are buffers.

        Raises:
            ServeError: the function's; UNAVAILABLE where the process has ended.
        """
        async with self._places:
            if self._idle:
                process, ending = self._idle.popitem()
                ending.cancel()
            else:
                process = _Process()
            try:
                outcome = await process.call(function, body)
            except (OSError, EOFError):
                process.end()
                raise ServeError(
                    StatusCode.UNAVAILABLE,
                    f"the process that parses large bodies has ended, the system may have no memory for {len(body)}"
                    " bytes of JSON; send less at once, or tensors in binary form",
                ) from None
            except BaseException:
                process.end()  # It may be in the middle of this body.
                raise
            self._idle[process] = asyncio.get_running_loop().call_later(_IDLE_SECONDS, self._end, process)
        if isinstance(outcome, _Refusal):
            raise ServeError(outcome.code, outcome.text)
        return outcome

    def _end(self, process: _Process) -> None:
        del self._idle[process]
        process.end()


class _Refusal:
    """A ServeError on its way: exceptions are not pickled with what they were made of."""

    def __init__(self, error: ServeError) -> None:
        self.code, self.text = error.code, error.text


class _Process:
    def __init__(self) -> None:
        self._connection, other = socket.socketpair()
        self._connection.setblocking(False)
        parent_pipe, self._parent_pipe = os.pipe2(os.O_CLOEXEC)
        with other:
            given = other.fileno(), parent_pipe
            # A process group of its own: Ctrl-C reaches the server alone.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"from {__name__} import serve; serve{given}"],
                stdin=subprocess.DEVNULL,
                pass_fds=given,
                process_group=0,
            )
        os.close(parent_pipe)

    async def call(self, function: Callable[[Buffer], Any], body: Buffer) -> Any:
        loop = asyncio.get_running_loop()
        said = pickle.dumps(function)
        await loop.sock_sendall(self._connection, _LENGTHS.pack(len(said), len(body)) + said)
        await loop.sock_sendall(self._connection, body)
        said_bytes, count = _LENGTHS.unpack(await self._receive(_LENGTHS.size))
        answer = await self._receive(said_bytes)
        sizes = struct.unpack(f"<{count}Q", await self._receive(8 * count))
        return pickle.loads(answer, buffers=[await self._receive(size) for size in sizes])

    async def _receive(self, nbytes: int) -> bytearray:
        loop, data = asyncio.get_running_loop(), bytearray(nbytes)
        view = memoryview(data)
        while view:
            come = await loop.sock_recv_into(self._connection, view)
            if not come:
                raise EOFError
            view = view[come:]
        return data

    def end(self) -> None:
        self._connection.close()
        self._process.kill()
        os.close(self._parent_pipe)
        # A large one takes a while to go.
        asyncio.get_running_loop().run_in_executor(None, self._process.wait)


def serve(descriptor: int, parent_pipe: int) -> None:
    """What such a process does: parse what comes until the server is gone."""
    exit_with_parent(parent_pipe)
    connection = socket.socket(fileno=descriptor)
    os.nice(_NICENESS)
    with contextlib.suppress(OSError):
        # Where memory is short the system ends this process before others.
        Path("/proc/self/oom_score_adj").write_text("1000")
    with connection.makefile("rb") as received, contextlib.suppress(OSError):
        while lengths := received.read(_LENGTHS.size):
            said_bytes, body_bytes = _LENGTHS.unpack(lengths)
            function = pickle.loads(received.read(said_bytes))
            body = bytearray(body_bytes)
            received.readinto(body)
            buffers: list[pickle.PickleBuffer] = []
            answer = pickle.dumps(_outcome(function, body), 5, buffer_callback=buffers.append)
            views = [buffer.raw() for buffer in buffers]
            connection.sendall(_LENGTHS.pack(len(answer), len(views)))
            connection.sendall(answer)
            connection.sendall(struct.pack(f"<{len(views)}Q", *map(len, views)))
            for view in views:
                connection.sendall(view)
            del body, buffers, views, answer


def _outcome(function: Callable[[Buffer], Any], body: bytearray) -> Any:
    try:
        parsed = function(body)
    except ServeError as error:
        return _Refusal(error)
    if data := getattr(parsed, "data", None):
        parsed.data[:] = [
            pickle.PickleBuffer(entry) if not isinstance(entry, slice) and len(entry) >= _LEAST_APART else entry
            for entry in data
        ]
    return parsed
