"""Supervisor of a protocol's processes: starts them on one port, starts those again that die, and ends them.

They are started by exec: a fork of a process with threads, and with gRPC in it, is no sound process. Each end knows of
the other's by its sockets: what is left behind by either is let go at once.
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
from rocserve.repository.retry import RetryPolicy

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
            routes: of all that the front ends forward; called on the loop.
        """
        self.protocol = where.protocol
        self._where = where
        self._count = count
        self._routes = routes
        self._common = common
        self._log = log
        self._reservation: socket.socket | None = None
        self._lifeline_reader, self._lifeline_writer = os.pipe2(os.O_CLOEXEC)
        self._port = 0
        self._running: dict[int, FrontEndProcess] = {}
        self._deaths: dict[int, int] = {}
        """By the number of the front end: how many it has died in a row, soon after its start."""
        self._restarts: dict[int, asyncio.TimerHandle] = {}
        self._has_started = False
        self._is_ending = False

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
        for number in range(self._count):
            self._spawn(number)
        try:
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
        self._is_ending = True
        for restart in self._restarts.values():
            restart.cancel()
        try:
            await self._end_all(grace_seconds)
        except asyncio.CancelledError:
            await self._end_all(0.0)
            raise
        finally:
            if self._reservation is not None:
                self._reservation.close()
                self._reservation = None
            os.close(self._lifeline_reader)
            os.close(self._lifeline_writer)

    async def _end_all(self, grace_seconds: float) -> None:
        running = list(self._running.values())
        if not running:
            return
        for front_end in running:
            front_end.stop(grace_seconds)
        ends = [front_end.ended for front_end in running]
        await asyncio.wait(ends, timeout=grace_seconds + (_END_SECONDS if grace_seconds else _AT_ONCE_SECONDS))
        for front_end in self._running.values():
            self._log.warning(
                "front end %d of %s has not ended in time; it is killed", front_end.number, front_end.protocol
            )
            front_end.kill()
        await asyncio.wait(ends, timeout=_END_SECONDS)

    def _spawn(self, number: int) -> None:
        self._restarts.pop(number, None)
        front_end = FrontEndProcess(self.protocol, number, self._common, self._routes, self._log, self._ended)
        front_end.start(self._lifeline_reader, self._port)
        self._running[number] = front_end

    def tell_wants(self) -> None:
        """Whether requests are to say where they come from may have changed."""
        for front_end in self._running.values():
            front_end.tell_wants()

    def _ended(self, front_end: FrontEndProcess, how: str) -> None:
        number = front_end.number
        del self._running[number]
        if self._is_ending or not (self._has_started or front_end.has_listened):
            return
        deaths = 0 if front_end.age >= _HEALTHY_SECONDS else self._deaths.get(number, 0) + 1
        self._deaths[number] = deaths
        pause = (_RESTARTS.pause(deaths) or 0.0) if deaths else 0.0
        self._log.error(
            "front end %d of %s has ended (%s), and its clients' connections with it; another is started%s",
            number,
            front_end.protocol,
            how,
            f" in {pause:g} s" if pause else "",
        )
        loop = asyncio.get_running_loop()
        self._restarts[number] = loop.call_later(pause, self._restart, number)

    def _restart(self, number: int) -> None:
        try:
            self._spawn(number)
        except OSError as error:
            self._deaths[number] = self._deaths.get(number, 0) + 1
            pause = _RESTARTS.pause(self._deaths[number]) or 0.0
            self._log.error(
                "front end %d of %s cannot be started (%s); it is tried again", number, self._where.protocol, error
            )
            self._restarts[number] = asyncio.get_running_loop().call_later(pause, self._restart, number)
