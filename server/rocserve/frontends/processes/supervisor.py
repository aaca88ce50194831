"""Supervisor of a protocol's processes: starts them on one port, starts those again that die, and ends them.

They are started by exec: a fork of a process with threads, and with gRPC in it, is no sound process. Each end knows of
the other's by its sockets: what either leaves behind is let go at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Mapping

from rocserve.frontends.grpc.transport import Route
from rocserve.frontends.listen_address import ListenAddress
from rocserve.frontends.processes.process import FrontEndParts, FrontEndProcess
from rocserve.repository.lifecycle import RetryPolicy

_START_SECONDS = 60.0
"""Until a front end listens: half a second, and many times that on a busy machine."""
_HEALTHY_SECONDS = 2.0
"""A front end that has served for so long died of something new."""
_RESTARTS = RetryPolicy(first_seconds=0.1, longest_seconds=5.0)
_END_SECONDS = 5.0
"""Beyond the grace time, in which a front end closes its connections."""
_AT_ONCE_SECONDS = 1.0
"""The same where there is no grace time."""


class FrontEndProcesses:
    """All calls are made on the asyncio loop."""

    def __init__(
        self,
        where: ListenAddress,
        count: int,
        routes: Mapping[str, Route],
        common: FrontEndParts,
        log: logging.Logger,
    ) -> None:
        """
        Args:
            where: what all of them serve; they share its port.
            routes: of all that the front ends forward; called on the plane's thread.
        """
        self.protocol = where.protocol
        self._where = where
        self._count = count
        self._routes = routes
        self._common = common
        self._log = log
        self._reservation: socket.socket | None = None
        self._parent_pipe_reader, self._parent_pipe_writer = os.pipe2(os.O_CLOEXEC)
        self._port = 0
        self._running: dict[int, FrontEndProcess] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._has_started = False

    async def start(self) -> int:
        """Until all listen; their port.

        Raises:
            OSError, RuntimeError: they cannot; none is left.
        """
        try:
            self._reservation = self._where.bind()
        except OSError as error:
            raise self._where.refusal(error) from None
        self._port = self._reservation.getsockname()[1]
        try:
            for number in range(self._count):
                self._keepers.append(asyncio.create_task(self._keep(number, self._spawn(number))))
            async with asyncio.timeout(_START_SECONDS):
                await asyncio.gather(*(front_end.listening for front_end in self._running.values()))
        except TimeoutError:
            await self.stop(0.0)
            raise RuntimeError(
                f"the front ends of {self._where.protocol} have not begun to listen within {_START_SECONDS:g} s"
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
            front_end.begin_exit()

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
            os.close(self._parent_pipe_reader)
            os.close(self._parent_pipe_writer)

    async def _end_all(self, grace_seconds: float) -> None:
        running = [front_end for front_end in self._running.values() if not front_end.ended.done()]
        if not running:
            return
        for front_end in running:
            front_end.stop(grace_seconds)
        seconds = grace_seconds + (_END_SECONDS if grace_seconds else _AT_ONCE_SECONDS)
        _, late = await asyncio.wait([front_end.ended for front_end in running], timeout=seconds)
        for front_end in running:
            if front_end.ended in late:
                self._log.warning(
                    "front end %d of %s has not ended in time; it is killed", front_end.number, front_end.protocol
                )
                front_end.kill()
        if late:
            await asyncio.wait(late, timeout=_END_SECONDS)

    def _spawn(self, number: int) -> FrontEndProcess:
        """Raises: OSError."""
        parent_pipe = self._parent_pipe_reader
        front_end = self._running[number] = FrontEndProcess(
            self.protocol, number, self._common, self._routes, parent_pipe, self._port, self._log
        )
        return front_end

    async def _keep(self, number: int, front_end: FrontEndProcess) -> None:
        """Have another in its place whenever it dies."""
        deaths = 0
        while True:
            how = await asyncio.shield(front_end.ended)
            del self._running[number]
            if not (self._has_started or front_end.has_listened):
                return
            deaths = 0 if front_end.age >= _HEALTHY_SECONDS else deaths + 1
            pause = (_RESTARTS.pause(deaths) or 0.0) if deaths else 0.0
            self._log.error(
                "front end %d of %s has ended (%s), and its clients' connections with it; another is started%s",
                number,
                self.protocol,
                how,
                f" in {pause:g} s" if pause else "",
            )
            front_end, deaths = await self._restart(number, deaths, pause)

    async def _restart(self, number: int, deaths: int, pause: float) -> tuple[FrontEndProcess, int]:
        """The next one, and how many have died in a row, soon after their start, or not begun."""
        while True:
            await asyncio.sleep(pause)
            try:
                return self._spawn(number), deaths
            except OSError as error:
                deaths += 1
                pause = _RESTARTS.pause(deaths) or 0.0
                self._log.error(
                    "front end %d of %s cannot be started (%s); it is tried again", number, self.protocol, error
                )

    def send_wants(self) -> None:
        """Whether requests are to say where they come from may have changed."""
        for front_end in self._running.values():
            front_end.send_wants()
