"""The loop of a front end of HTTP: asyncio's, which serves the link to the server in its turns."""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import selectors
from collections.abc import Callable, Iterator

from rocserve.observability.failures import RequestFailures
from rocserve.plane import anonymous_file
from rocserve.plane.doorbell import fence
from rocserve.plane.loop import Source

Callback = Callable[[], None]


class FrontEndLoop(asyncio.SelectorEventLoop):
    """Implements loop.Plane. All is called on its thread."""

    def __init__(self, log: logging.Logger) -> None:
        self._turns = _Turns(log)
        super().__init__(self._turns)

    @property
    def sleeps(self) -> int:
        """See Plane."""
        return self._turns.file

    def register(self, descriptor: int, on_readable: Callback) -> None:
        """See Plane."""
        self.add_reader(descriptor, on_readable)

    def unregister(self, descriptor: int) -> None:
        """See Plane."""
        self.remove_reader(descriptor)

    def at_end_of_turn(self, callback: Callback) -> None:
        """See Plane."""
        self._turns.ends[callback] = None

    def work_off(self, steps: Iterator[None]) -> None:
        """See Plane."""
        if next(steps, steps) is None:
            self.call_soon(self.work_off, steps)

    def add_source(self, source: Source) -> None:
        """See Plane. Who rings for it rings by a registered descriptor."""
        self._turns.sources.append(source)


class _Turns(selectors.EpollSelector):
    """The end of each turn of the loop: posts what has come together in it, takes what is there, and sleeps where
    nothing is, as a doorbell does."""

    def __init__(self, log: logging.Logger) -> None:
        super().__init__()
        self.file = anonymous_file.create("rocserve:doorbell", mmap.PAGESIZE)
        self.sources: list[Source] = []
        self.ends: dict[Callback, None] = {}
        self._word = anonymous_file.map_to_write(self.file).cast("Q")
        self._failures = RequestFailures(log)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What can be read or written to."""
        busy = False
        try:
            for source in self.sources:
                busy = source.poll() or busy
            ends, self.ends = self.ends, {}
            for callback in ends:
                callback()
        except Exception as error:
            self._failures.report("a turn of the front end's loop failed", error)
        if busy or (timeout is not None and timeout <= 0):
            # Handles that answers have scheduled are run behind this.
            return super().select(0)
        self._word[0] += 1
        fence()
        try:
            has_mail = any(source.has_mail() for source in self.sources)
            return super().select(0 if has_mail else timeout)
        finally:
            self._word[0] += 1

    def close(self) -> None:
        super().close()
        os.close(self.file)
