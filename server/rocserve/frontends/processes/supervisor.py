"""Supervises front end processes: starts them on the same ports, restarts those that die, and ends them.

Processes start by exec, because a fork of a process with threads and gRPC is not safe. Each end notices through its
sockets that the other end has died, and releases immediately what that end held.
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
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from rocserve.core import bootstrap
from rocserve.core.backoff import Backoff
from rocserve.core.memo import Memo
from rocserve.core.request_memory import RequestMemory
from rocserve.core.requests import RequestHead
from rocserve.frontends.grpc.service import ServerRoutes
from rocserve.frontends.processes.server_end import FrontLink
from rocserve.frontends.shared_ports import SharedPorts
from rocserve.links import entries
from rocserve.observability.log_fields import about
from rocserve.plane.loop import PlaneLoop
from rocserve.services.inference import InferenceService
from rocserve.workers.worker_output import WorkerOutput

PROTOCOLS = ("HTTP", "gRPC")
"""The order of the ports in a front end's command."""
_START_SECONDS = 60.0
"""Time limit for front ends to listen. It takes half a second, and many times that on a busy machine."""
_RESTARTS = Backoff(first_seconds=0.1, longest_seconds=5.0)
_END_SECONDS = 5.0
"""Added to the grace time, because a front end must then close its connections."""


@dataclass(frozen=True, slots=True)
class FrontEndParts:
    """The common part of all front ends."""

    command: Sequence[str]
    """The flags of the server."""
    inference: InferenceService
    """Answers inference requests, on the plane's thread."""
    plane: PlaneLoop
    memory: RequestMemory
    """Shared by the front ends and the server."""
    renewal_ms: int
    """The age at which gRPC connections are renewed; 0 = not at all. Front ends then also report their work."""
    tables: Sequence[int]
    """Descriptors of the serving table's edition and of the table of memory use, see main.py."""
    heads: Memo[bytes, RequestHead] = field(default_factory=Memo)
    """Bytes of a head -> its object. All front ends share this, because plans are remembered by the object."""


class FrontEndProcess:
    """Runs one front end process. On the event loop."""

    def __init__(self, owner: FrontEndProcesses, number: int) -> None:
        """Raises OSError if the process cannot be started; nothing is left of it then."""
        parts = owner.parts
        self.number = number
        self._parts = parts
        self._log = owner.log
        loop = asyncio.get_running_loop()
        self.started_at = time.monotonic()
        self.worked_seconds = 0.0
        """The work of its data plane, as far as it has been reported."""
        self.listening: asyncio.Future[None] = loop.create_future()
        """Fails with an OSError or a RuntimeError if the front end cannot listen."""
        self.listening.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._closed: asyncio.Future[str] = loop.create_future()
        """The reason why the link has closed."""
        with ExitStack() as peers, ExitStack() as own:
            link, peer_link = socket.socketpair()
            own.callback(link.close)
            peers.callback(peer_link.close)
            reader, writer = os.pipe2(os.O_CLOEXEC)
            peers.callback(os.close, writer)
            own.callback(os.close, reader)
            self._link = FrontLink(
                link,
                parts.plane,
                parts.inference,
                owner.routes,
                parts.heads,
                lambda number, text: loop.call_soon_threadsafe(self._end_start, number, text),
                self._add_work,
                lambda reason: loop.call_soon_threadsafe(self._closed.set_result, reason),
                owner.log,
            )
            own.callback(self._link.discard)
            passed = (owner.parent_pipe[0], peer_link.fileno(), *parts.tables)
            self._row = parts.memory.add_front_end()
            own.callback(parts.memory.forget_front_end, self._row)
            ports = (owner.ports.ports.get(protocol, 0) for protocol in PROTOCOLS)
            numbers = (number, self._row, parts.memory.limit_bytes, parts.renewal_ms, *ports)
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    bootstrap.__file__,
                    "rocserve.frontends.processes.main",
                    *map(str, (*passed, *numbers)),
                    *parts.command,
                ],
                stdin=subprocess.DEVNULL,
                stdout=writer,
                stderr=writer,
                pass_fds=passed,
            )
            own.pop_all()
        self._output = WorkerOutput(reader, f"front end {number}: ", owner.log, {"front_end": number})
        parts.plane.call_soon(self._link.open)
        self.send_wants_origins()
        self.ended = loop.create_task(self._reap())
        """Returns how the process has ended."""

    def post(self, kind: int, number: int = 0, last: bool = False) -> None:
        """Post an entry without a text."""
        if not self._closed.done():
            self._parts.plane.call_soon(partial(self._link.post, kind, number, last))

    def send_wants_origins(self) -> None:
        self.post(entries.ORIGINS, last=self._parts.inference.wants_origins)

    @property
    def in_flight(self) -> int:
        """Return the number of its inference requests."""
        return 0 if self._closed.done() else self._link.in_flight

    def _add_work(self, microseconds: int) -> None:
        self.worked_seconds += microseconds / 1e6

    def _end_start(self, number: int, text: str) -> None:
        if self.listening.done():
            return  # The front end has failed already.
        if text:
            self.listening.set_exception(OSError(number, text) if number else RuntimeError(text))
        else:
            self.listening.set_result(None)

    async def _reap(self) -> str:
        why = await self._closed
        self._log.debug("front end %d: %s", self.number, why, extra=about(front_end=self.number))
        kill_at = time.monotonic() + 0.5
        while (status := self.process.poll()) is None:
            if time.monotonic() > kill_at:
                self.process.kill()
            await asyncio.sleep(0.01)
        self._parts.plane.call_soon(self._link.close)
        # The link refers to this object; without the cycle its memory goes immediately.
        del self._link
        self._parts.memory.forget_front_end(self._row)
        self._output.close()
        how = f"exit status {status}" if status >= 0 else f"killed by {_signal_name(-status)}"
        reason = self.listening.exception() if self.listening.done() else None
        if last := (reason.args[-1] if reason is not None else self._output.last_line):
            how += f": {last}"
        if not self.listening.done():
            self.listening.set_exception(RuntimeError(f"a front end has ended before it listened ({how})"))
        return how


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(eq=False)
class FrontEndProcesses:
    """Keeps the processes running. On the event loop."""

    ports: SharedPorts
    """The ports of all processes."""
    count: int
    routes: ServerRoutes
    """The routes of the calls that front ends forward; called on the plane's thread."""
    parts: FrontEndParts
    log: logging.Logger
    parent_pipe: tuple[int, int] = field(default_factory=lambda: os.pipe2(os.O_CLOEXEC), init=False)
    """The processes end when the writing end of this pipe is closed."""
    _running: dict[int, FrontEndProcess] = field(default_factory=dict, init=False)
    _supervisions: dict[int, asyncio.Task[None]] = field(default_factory=dict, init=False)
    _has_started: bool = field(default=False, init=False)
    _retires: bool = field(default=False, init=False)
    """Front ends that end are not started again."""

    async def start(self) -> None:
        """Start the processes that do not run, and wait until all listen. Raises OSError or RuntimeError if one cannot;
        no process remains."""
        self._retires = self._has_started = False
        try:
            for number in range(self.count):
                supervision = self._supervisions.get(number)
                if supervision is None or supervision.done():
                    supervising = self._supervise(number, self._spawn(number))
                    self._supervisions[number] = asyncio.create_task(supervising)
            async with asyncio.timeout(_START_SECONDS):
                await asyncio.gather(*(front_end.listening for front_end in self._running.values()))
        except TimeoutError:
            await self._end_all(0.0)
            raise RuntimeError(f"the front ends did not listen within {_START_SECONDS:g} s") from None
        except (OSError, RuntimeError):
            await self._end_all(0.0)
            raise
        self._has_started = True
        self._post_exit(entries.STAY)

    def retire(self) -> None:
        """Let each process end when its last client has gone. It must not get new connections."""
        self._retires = True
        self._post_exit(entries.RETIRE)

    def close_after_answers(self) -> None:
        """Let HTTP's clients connect again, here or elsewhere."""
        self._post_exit(entries.CLOSE)

    def end_streams(self) -> None:
        """End the streams that wait for no answer, because the server has begun to end."""
        self._post_exit(entries.END_STREAMS)

    def _post_exit(self, how: int) -> None:
        for front_end in self._running.values():
            front_end.post(entries.EXIT, how)

    async def stop(self, grace_seconds: float) -> None:
        """Refuse new calls, let calls in flight finish within the grace time, and end all processes; immediately when
        cancelled. Processes that die are not restarted."""
        try:
            await self._end_all(grace_seconds)
        except asyncio.CancelledError:
            await self._end_all(0.0)
            raise
        finally:
            for descriptor in self.parent_pipe:
                os.close(descriptor)

    async def _end_all(self, grace_seconds: float) -> None:
        for supervision in self._supervisions.values():
            supervision.cancel()
        self._supervisions.clear()
        running = [front_end for front_end in self._running.values() if not front_end.ended.done()]
        if not running:
            return
        for front_end in running:
            # 49 days at most: the number must fit into an entry.
            front_end.post(entries.STOP, min(round(1000 * grace_seconds), (1 << 32) - 1))
        seconds = grace_seconds + (_END_SECONDS if grace_seconds else 1.0)
        _, late = await asyncio.wait([front_end.ended for front_end in running], timeout=seconds)
        for front_end in running:
            if front_end.ended in late:
                fields = about(front_end=front_end.number)
                self.log.warning("front end %d did not end in time and is killed", front_end.number, extra=fields)
                front_end.process.kill()
        if late:
            await asyncio.wait(late, timeout=_END_SECONDS)

    def _spawn(self, number: int) -> FrontEndProcess:
        """Raises OSError."""
        front_end = self._running[number] = FrontEndProcess(self, number)
        return front_end

    async def _supervise(self, number: int, front_end: FrontEndProcess) -> None:
        """Restart a front end whenever it dies."""
        deaths = 0
        """Deaths in a row soon after the start, or failures to start."""
        while True:
            how = await asyncio.shield(front_end.ended)
            del self._running[number]
            reason = front_end.listening.exception()
            if not self._has_started and reason is not None:
                return
            # The death of a front end that has served for two seconds does not lengthen the pause before the restart.
            deaths = 0 if time.monotonic() - front_end.started_at >= 2.0 else deaths + 1
            pause = _RESTARTS.pause_seconds(deaths)
            if reason is None and front_end.process.returncode == 0:
                # It had no clients.
                self.log.debug("front end %d has left", number, extra=about(front_end=number))
            else:
                another = f"; another is started{f' in {pause:g} s' if pause else ''}"
                self.log.error(
                    "front end %d has ended (%s), and its clients' connections with it%s",
                    number,
                    how,
                    "" if self._retires else another,
                    extra=about(front_end=number),
                )
            if self._retires:
                return
            while front_end.ended.done():
                await asyncio.sleep(pause)
                if self._retires:
                    return
                try:
                    front_end = self._spawn(number)
                except OSError as error:
                    deaths += 1
                    pause = _RESTARTS.pause_seconds(deaths)
                    text = "cannot start front end %d (%s); retrying"
                    self.log.error(text, number, error, extra=about(front_end=number))

    @property
    def worked_seconds(self) -> float:
        """Return the work of the running front ends."""
        return sum(front_end.worked_seconds for front_end in self._running.values())

    @property
    def in_flight(self) -> int:
        return sum(front_end.in_flight for front_end in self._running.values())

    def send_wants_origins(self) -> None:
        for front_end in self._running.values():
            front_end.send_wants_origins()
