"""Supervisor of a protocol's processes: starts them on one port, starts those again that die, and ends them.

They are started by exec: a fork of a process with threads, and with gRPC in it, is no sound process. Each end knows of
the other's by its sockets: what either leaves behind is let go at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rocserve import workers
from rocserve.core.memo import Memo
from rocserve.core.request_memory import RequestMemory
from rocserve.core.requests import RequestHead
from rocserve.frontends.grpc.transport import Route
from rocserve.frontends.listen_address import ListenAddress
from rocserve.frontends.processes import entries
from rocserve.frontends.processes.server_end import FrontLink
from rocserve.plane.loop import PlaneLoop
from rocserve.repository.lifecycle import RetryPolicy
from rocserve.services.inference import InferenceService
from rocserve.workers.worker_output import WorkerOutput

_START_SECONDS = 60.0
"""Until a front end listens: half a second, and many times that on a busy machine."""
_HEALTHY_SECONDS = 2.0
"""A front end that has served for so long died of something new."""
_RESTARTS = RetryPolicy(first_seconds=0.1, longest_seconds=5.0)
_LONGEST_GRACE_MS = (1 << 32) - 1
"""49 days."""
_END_SECONDS = 5.0
"""Beyond the grace time, in which a front end closes its connections."""
_AT_ONCE_SECONDS = 1.0
"""The same where there is no grace time."""


_BOOTSTRAP = Path(workers.__file__).with_name("bootstrap.py")
"""Not `python -m`: that would search for modules in the folder that the server happens to run in."""
_REAP_SECONDS = 0.01
"""Between two checks whether a process that has closed its sockets has ended."""
_CLOSED_SECONDS = 0.5
"""How long it may live on without them."""


@dataclass(frozen=True, slots=True)
class FrontEndParts:
    """What the front ends of all protocols have in common."""

    command: Sequence[str]
    """The flags that the server was started with."""
    inference: InferenceService
    """What answers inference, on the plane's thread."""
    plane: PlaneLoop
    memory: RequestMemory
    """That they have together with the server."""
    tables: Sequence[int]
    """Descriptors of the serving table's edition, and of the table where the memory's use is counted; see main.py."""
    heads: Memo[bytes, RequestHead] = field(default_factory=Memo)
    """Of requests, by the bytes that front ends send of them. What is worked out from a head is remembered by the
    object, so that it is one for all front ends."""


class FrontEndProcess:
    """On the asyncio loop."""

    def __init__(self, owner: FrontEndProcesses, number: int, parent_pipe: int, port: int) -> None:
        """`parent_pipe`: the reading end of a pipe; when its writing end is gone, the process ends. Raises: OSError: it
        cannot be started; nothing is left of it."""
        common, protocol = owner.common, owner.where.protocol
        self.number = number
        self._protocol = protocol
        self._common = common
        self._log = owner.log
        loop = asyncio.get_running_loop()
        self.started_at = time.monotonic()
        self.listening: asyncio.Future[None] = loop.create_future()
        """Its exception, an OSError or a RuntimeError, says why it does not."""
        self.listening.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._closed: asyncio.Future[str] = loop.create_future()
        """Why nothing more comes from it."""
        with ExitStack() as peers, ExitStack() as own:
            link, peer_link = socket.socketpair()
            own.callback(link.close)
            peers.callback(peer_link.close)
            reader, writer = os.pipe2(os.O_CLOEXEC)
            peers.callback(os.close, writer)
            own.callback(os.close, reader)
            self._link = FrontLink(
                link,
                protocol.upper(),
                common.plane,
                common.inference,
                owner.routes,
                common.heads,
                lambda number, text: loop.call_soon_threadsafe(self._end_start, number, text),
                lambda reason: loop.call_soon_threadsafe(self._closed.set_result, reason),
                owner.log,
            )
            passed = (parent_pipe, peer_link.fileno(), *common.tables)
            self._row = common.memory.add_front_end()
            own.callback(common.memory.forget_front_end, self._row)
            numbers = (number, self._row, port, common.memory.limit_bytes)
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    str(_BOOTSTRAP),
                    "rocserve.frontends.processes.main",
                    protocol.lower(),
                    *map(str, (*passed, *numbers)),
                    *common.command,
                ],
                stdin=subprocess.DEVNULL,
                stdout=writer,
                stderr=writer,
                pass_fds=passed,
            )
            own.pop_all()
        self._output = WorkerOutput(reader, f"front end {number} of {protocol}: ", owner.log)
        common.plane.call_soon(self._link.open)
        self.send_wants()
        self.ended = loop.create_task(self._reap())
        """How it has ended."""

    def tell(self, kind: int, number: int = 0, flags: int = 0) -> None:
        """Post an entry that has no contents."""
        if not self._closed.done():
            self._common.plane.call_soon(partial(self._link.post, kind, number, flags))

    def send_wants(self) -> None:
        """Whether its requests are to say where they come from."""
        self.tell(entries.ORIGINS, flags=entries.FINAL if self._common.inference.wants_origins else 0)

    def _end_start(self, number: int, text: str) -> None:
        if self.listening.done():
            return  # Nobody waits any more.
        if text:
            self.listening.set_exception(OSError(number, text) if number else RuntimeError(text))
        else:
            self.listening.set_result(None)

    async def _reap(self) -> str:
        self._log.debug("front end %d of %s: %s", self.number, self._protocol, await self._closed)
        kill_at = time.monotonic() + _CLOSED_SECONDS
        while (status := self.process.poll()) is None:
            if time.monotonic() > kill_at:
                self.process.kill()
            await asyncio.sleep(_REAP_SECONDS)
        self._common.plane.call_soon(self._link.close)
        # It knows this object, and its memory is to go with it.
        del self._link
        self._common.memory.forget_front_end(self._row)
        self._output.close()
        how = f"exit status {status}" if status >= 0 else f"killed by {_signal_name(-status)}"
        reason = self.listening.exception() if self.listening.done() else None
        if last := (reason.args[-1] if reason is not None else self._output.last_line):
            how += f": {last}"
        if not self.listening.done():
            self.listening.set_exception(
                RuntimeError(f"a front end of {self._protocol} has ended before it listened ({how})")
            )
        return how


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(eq=False)
class FrontEndProcesses:
    """All calls are made on the asyncio loop."""

    where: ListenAddress
    """What all of them serve; they share its port."""
    count: int
    routes: Mapping[str, Route]
    """Of all that the front ends forward; called on the plane's thread."""
    common: FrontEndParts
    log: logging.Logger
    _reservation: socket.socket | None = field(default=None, init=False)
    _parent_pipe: tuple[int, int] = field(default_factory=lambda: os.pipe2(os.O_CLOEXEC), init=False)
    _port: int = field(default=0, init=False)
    _running: dict[int, FrontEndProcess] = field(default_factory=dict, init=False)
    _keepers: list[asyncio.Task[None]] = field(default_factory=list, init=False)
    _has_started: bool = field(default=False, init=False)

    async def start(self) -> int:
        """Until all listen; their port. Raises: OSError, RuntimeError: they cannot; none is left."""
        try:
            self._reservation = self.where.bind()
        except OSError as error:
            raise self.where.refusal(error) from None
        self._port = self._reservation.getsockname()[1]
        try:
            for number in range(self.count):
                self._keepers.append(asyncio.create_task(self._keep(number, self._spawn(number))))
            async with asyncio.timeout(_START_SECONDS):
                await asyncio.gather(*(front_end.listening for front_end in self._running.values()))
        except TimeoutError:
            await self.stop(0.0)
            raise RuntimeError(
                f"the front ends of {self.where.protocol} have not begun to listen within {_START_SECONDS:g} s"
            ) from None
        except (OSError, RuntimeError):
            await self.stop(0.0)
            raise
        self._has_started = True
        return self._port

    def begin_exit(self) -> None:
        """The server has begun to end: clients of HTTP are to connect anew, streams of gRPC end that wait for
        nothing."""
        for front_end in self._running.values():
            front_end.tell(entries.EXIT)

    async def stop(self, grace_seconds: float) -> None:
        """Refuse new calls, wait for those in flight, at most for the grace time, and end all; at once when
        cancelled. What dies is not started again."""
        for keeper in self._keepers:
            keeper.cancel()
        try:
            await self._end_all(grace_seconds)
        except asyncio.CancelledError:
            await self._end_all(0.0)
            raise
        finally:
            if self._reservation is not None:
                self._reservation.close()
                self._reservation = None
            for descriptor in self._parent_pipe:
                os.close(descriptor)

    async def _end_all(self, grace_seconds: float) -> None:
        running = [front_end for front_end in self._running.values() if not front_end.ended.done()]
        if not running:
            return
        for front_end in running:
            front_end.tell(entries.STOP, min(round(1000 * grace_seconds), _LONGEST_GRACE_MS))
        seconds = grace_seconds + (_END_SECONDS if grace_seconds else _AT_ONCE_SECONDS)
        _, late = await asyncio.wait([front_end.ended for front_end in running], timeout=seconds)
        for front_end in running:
            if front_end.ended in late:
                self.log.warning(
                    "front end %d of %s has not ended in time; it is killed", front_end.number, self.where.protocol
                )
                front_end.process.kill()
        if late:
            await asyncio.wait(late, timeout=_END_SECONDS)

    def _spawn(self, number: int) -> FrontEndProcess:
        """Raises: OSError."""
        front_end = self._running[number] = FrontEndProcess(self, number, self._parent_pipe[0], self._port)
        return front_end

    async def _keep(self, number: int, front_end: FrontEndProcess) -> None:
        """Have another in its place whenever it dies."""
        deaths = 0
        """In a row, soon after their start, or not begun."""
        while True:
            how = await asyncio.shield(front_end.ended)
            del self._running[number]
            if not self._has_started and (not front_end.listening.done() or front_end.listening.exception()):
                return
            deaths = 0 if time.monotonic() - front_end.started_at >= _HEALTHY_SECONDS else deaths + 1
            pause = (_RESTARTS.pause(deaths) or 0.0) if deaths else 0.0
            self.log.error(
                "front end %d of %s has ended (%s), and its clients' connections with it; another is started%s",
                number,
                self.where.protocol,
                how,
                f" in {pause:g} s" if pause else "",
            )
            while front_end.ended.done():
                await asyncio.sleep(pause)
                try:
                    front_end = self._spawn(number)
                except OSError as error:
                    deaths += 1
                    pause = _RESTARTS.pause(deaths) or 0.0
                    self.log.error(
                        "front end %d of %s cannot be started (%s); it is tried again",
                        number,
                        self.where.protocol,
                        error,
                    )

    def send_wants(self) -> None:
        """Whether requests are to say where they come from may have changed."""
        for front_end in self._running.values():
            front_end.send_wants()
