"""One process that serves gRPC or HTTP, as the server sees it: its link, what it says and how it ends."""

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
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rocserve import workers
from rocserve.core.request_memory import RequestMemory
from rocserve.frontends.grpc.transport import Route
from rocserve.frontends.processes.server_end import FrontLink
from rocserve.plane.loop import PlaneLoop
from rocserve.services.inference import InferenceService
from rocserve.workers.worker_output import WorkerOutput

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


class FrontEndProcess:
    """On the asyncio loop."""

    def __init__(
        self,
        protocol: str,
        number: int,
        common: FrontEndParts,
        routes: Mapping[str, Route],
        parent_pipe: int,
        port: int,
        log: logging.Logger,
    ) -> None:
        """
        Args:
            protocol: gRPC or HTTP.
            routes: of the calls that it forwards; called on the plane's thread.
            parent_pipe: the reading end of a pipe; when its writing end is gone, the process ends.

        Raises:
            OSError: it cannot be started; nothing is left of it.
        """
        self.protocol = protocol
        self.number = number
        self._plane = common.plane
        self._common = common
        self._log = log
        self._loop = loop = asyncio.get_running_loop()
        self._started_at = time.monotonic()
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
                link, protocol.upper(), common.plane, common.inference, routes, self._on_listening, self._on_gone, log
            )
            passed = (parent_pipe, peer_link.fileno(), *common.tables)
            self._row = common.memory.add_front_end()
            own.callback(common.memory.forget_front_end, self._row)
            numbers = (number, self._row, port, common.memory.limit_bytes)
            self._process = subprocess.Popen(
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
        self._output = WorkerOutput(reader, f"front end {number} of {protocol}: ", log)
        self._plane.call_soon(self._link.open)
        self.send_wants()
        self.ended = loop.create_task(self._reap())
        """How it has ended."""

    @property
    def age(self) -> float:
        """Seconds."""
        return time.monotonic() - self._started_at

    @property
    def has_listened(self) -> bool:
        return self.listening.done() and self.listening.exception() is None

    def send_wants(self) -> None:
        """Whether its requests are to say where they come from."""
        if not self._closed.done():
            self._plane.call_soon(partial(self._link.want_origins, self._common.inference.wants_origins))

    def begin_exit(self) -> None:
        if not self._closed.done():
            self._plane.call_soon(self._link.begin_exit)

    def stop(self, grace_seconds: float) -> None:
        if not self._closed.done():
            self._plane.call_soon(partial(self._link.stop, grace_seconds))

    def kill(self) -> None:
        self._process.kill()

    def _on_listening(self, number: int, text: str) -> None:
        self._loop.call_soon_threadsafe(self._end_start, number, text)

    def _end_start(self, number: int, text: str) -> None:
        if self.listening.done():
            return  # Nobody waits any more.
        if text:
            self.listening.set_exception(OSError(number, text) if number else RuntimeError(text))
        else:
            self.listening.set_result(None)

    def _on_gone(self, reason: str) -> None:
        self._loop.call_soon_threadsafe(self._closed.set_result, reason)

    async def _reap(self) -> str:
        self._log.debug("front end %d of %s: %s", self.number, self.protocol, await self._closed)
        kill_at = time.monotonic() + _CLOSED_SECONDS
        while (status := self._process.poll()) is None:
            if time.monotonic() > kill_at:
                self.kill()
            await asyncio.sleep(_REAP_SECONDS)
        self._plane.call_soon(self._link.close)
        # It knows this object, and its memory is to go with it.
        del self._link
        self._common.memory.forget_front_end(self._row)
        self._output.close()
        how = _ending(status)
        reason = self.listening.exception() if self.listening.done() else None
        if last := (reason.args[-1] if reason is not None else self._output.last_line):
            how += f": {last}"
        if not self.listening.done():
            self.listening.set_exception(
                RuntimeError(f"a front end of {self.protocol} has ended before it listened ({how})")
            )
        return how


def _ending(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
