"""Doorbell wakes a process that sleeps; it costs a system call only when the process does.

A process looks at its links again and again, and sleeps only when nothing has come for a while. Before it sleeps it
says so in memory that all can read who write to it, looks once more, and waits for its bell. Whoever has written to it
reads that word, and rings where it says so. Each of the two writes before it reads, with a fence between, so that one
of them sees the other.
"""

from __future__ import annotations

import mmap
import os
import platform
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass

from rocserve.plane import anonymous_file

KEEPS_STORE_ORDER = platform.machine().lower() in ("x86_64", "amd64")
"""Whether other processors see what this one stores in the order of the program."""

_lock = threading.Lock()


def fence() -> None:
    """Keeps what was stored before apart from what is loaded or stored after.

    Taking a lock is a compare-and-swap: a full fence on x86. On Arm giving it back orders all that came before it, and
    taking it again all that comes after, and these two are never exchanged (store-release, load-acquire).
    """
    _lock.acquire()
    _lock.release()
    if not KEEPS_STORE_ORDER:
        _lock.acquire()
        _lock.release()


@dataclass(frozen=True, slots=True)
class DoorbellFiles:
    """The descriptors of a doorbell; the holder's, who closes them or gives them to one of the classes below."""

    sleeps: int
    """An anonymous file of one page, which the one that sleeps writes."""
    bell: int
    """An eventfd."""

    @classmethod
    def create(cls, name: str) -> DoorbellFiles:
        bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return cls(anonymous_file.create(name, mmap.PAGESIZE), bell)

    def for_ringing(self) -> DoorbellFiles:
        """Those of a process that rings."""
        return DoorbellFiles(anonymous_file.open_for_reading(self.sleeps), os.dup(self.bell))

    def close(self) -> None:
        os.close(self.sleeps)
        os.close(self.bell)


class Doorbell:
    """The side of the process that sleeps. Its word counts: even = awake, odd = asleep, a new one each time."""

    def __init__(self, files: DoorbellFiles) -> None:
        """Takes the files over."""
        self.files = files
        self._word = memoryview(anonymous_file.map_to_write(files.sleeps)).cast("Q")
        self._epoll = select.epoll()
        self._epoll.register(files.bell, select.EPOLLIN)

    def also_wake_for(self, descriptor: int) -> None:
        """`sleep` ends too when this one can be read."""
        self._epoll.register(descriptor, select.EPOLLIN)

    def sleep(self, seconds: float, has_mail: Callable[[], bool]) -> None:
        """Until somebody rings, another descriptor can be read, or the time is over; at once when there is mail."""
        word = self._word
        word[0] += 1
        fence()
        try:
            if not has_mail():
                for descriptor, _ in self._epoll.poll(seconds):
                    if descriptor == self.files.bell:
                        os.eventfd_read(descriptor)
        finally:
            word[0] += 1

    def close(self) -> None:
        self._epoll.close()
        self.files.close()


class Ringer:
    """The side of a process that has written to the one that may sleep."""

    def __init__(self, files: DoorbellFiles) -> None:
        """Takes the files over."""
        self._files = files
        self._word = memoryview(anonymous_file.map_to_read(files.sleeps)).cast("Q")
        self._rung = 0

    def ring(self) -> None:
        """To be called after the last of several messages. Rings once for each time that the other sleeps."""
        fence()
        asleep = self._word[0]
        if asleep & 1 and asleep != self._rung:
            self._rung = asleep
            os.eventfd_write(self._files.bell, 1)

    def close(self) -> None:
        self._files.close()
