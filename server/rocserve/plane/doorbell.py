"""Doorbell wakes a sleeping process, with a system call only if the process sleeps. A process polls its links in a
loop, and sleeps only after some polls without mail. It first marks itself asleep in a word of shared memory, polls once
more, and then waits. A writer posts an entry, reads that word, and rings if the process is asleep. Both write before
they read, with a fence between, so at least one of them sees the other's write."""

from __future__ import annotations

import mmap
import os
import platform
import select
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress

from rocserve.plane import anonymous_file

KEEPS_STORE_ORDER = platform.machine().lower() in ("x86_64", "amd64")
"""Whether other processors see this processor's stores in program order."""

_lock = threading.Lock()


def fence() -> None:
    """Complete earlier stores before later loads and stores. Taking a lock is a full fence on x86. On Arm, releasing it
    orders all earlier accesses, taking it again all later ones, and the two are never reordered."""
    _lock.acquire()
    _lock.release()
    if not KEEPS_STORE_ORDER:
        _lock.acquire()
        _lock.release()


class _Ringer(ABC):
    """Wakes a thread by the word in which the thread counts its sleeps: even = awake, odd = asleep."""

    def __init__(self, sleep_word: memoryview) -> None:
        self._word = sleep_word
        self._rung = 0

    def ring(self) -> None:
        """Wake the thread if it sleeps, at most once per sleep. Call it after the last of several messages. Safe on any
        thread."""
        fence()
        asleep = self._word[0]
        if asleep & 1 and asleep != self._rung:
            self._rung = asleep
            self._wake()

    @abstractmethod
    def _wake(self) -> None: ...


class Doorbell(_Ringer):
    """Lets a loop sleep until a descriptor is readable or another thread rings."""

    def __init__(self, name: str) -> None:
        self.sleeps = anonymous_file.create(name, mmap.PAGESIZE)
        """Descriptor of a page with the sleep word, for the processes that wake the loop."""
        super().__init__(anonymous_file.map_file(self.sleeps, to_write=True).cast("Q"))
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._bell, select.EPOLLIN)

    def also_wake_for(self, descriptor: int) -> None:
        """Make `sleep` end too when this descriptor is readable."""
        self._epoll.register(descriptor, select.EPOLLIN)

    def no_longer_wake_for(self, descriptor: int) -> None:
        self._epoll.unregister(descriptor)

    def sleep(self, seconds: float | None, has_mail: Callable[[], bool]) -> bool:
        """Sleep until a ring, a readable descriptor or the timeout (None = none); not if there is mail. Returns False
        after the timeout."""
        word = self._word
        word[0] += 1
        fence()
        try:
            if has_mail():
                return True
            readable = self._epoll.poll(seconds)
            for descriptor, _ in readable:
                if descriptor == self._bell:
                    os.eventfd_read(descriptor)
            return bool(readable)
        finally:
            word[0] += 1

    def _wake(self) -> None:
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        self._epoll.close()
        os.close(self._bell)
        os.close(self.sleeps)


def sleep_word(sleeps: int) -> memoryview:
    """Map another process's sleep word to read. The caller keeps the descriptor."""
    return anonymous_file.map_file(sleeps, to_write=False).cast("Q")[:1]


class SocketRinger(_Ringer):
    """Rings the thread that sleeps on the other end of a socket. A socket per worker, not one eventfd for all, keeps
    workers from taking each other's rings, and shows when the other end is closed."""

    def __init__(self, sleep_word: memoryview, connection: socket.socket) -> None:
        """`sleep_word`: the word of the other end, to read."""
        super().__init__(sleep_word)
        self._connection = connection

    def _wake(self) -> None:
        # Errors: full of rings, or closed by the other end, which the socket's reader notices.
        with suppress(OSError):
            self._connection.send(b"!", socket.MSG_DONTWAIT)


class SocketSleeper:
    """The end of a socket that sleeps."""

    def __init__(
        self, sleep_word: memoryview, connection: socket.socket, drain: Callable[[socket.socket], bool]
    ) -> None:
        """`sleep_word`: the word of this end. `drain`: `drain_rings`, or a function that also takes messages from the
        socket."""
        self._word = sleep_word
        self._connection = connection
        self._drain = drain
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._is_rung = False

    def sleep(self, seconds: float | None, has_mail: Callable[[], bool]) -> bool:
        """Sleep until a ring or the timeout, unless there is mail. Returns False if the other end had closed."""
        # Before this sleep begins: a sleep is rung once, and that ring must not be drained.
        is_there = not self._is_rung or self._drain(self._connection)
        word = self._word
        word[0] += 1
        fence()
        try:
            if has_mail():
                return True
            if is_there:
                self._is_rung = bool(self._poll.poll(None if seconds is None else seconds * 1000))
            return is_there
        finally:
            word[0] += 1


def drain_rings(connection: socket.socket) -> bool:
    """Take all rings. Returns False if the other end is closed."""
    try:
        return bool(connection.recv(4096, socket.MSG_DONTWAIT))
    except BlockingIOError:
        return True
    except OSError:
        return False
