"""Doorbell wakes a process that sleeps; it costs a system call only when the process does.

A process polls its links again and again, and sleeps only when nothing has come for a while. Before it sleeps it
says so in memory that all its writers can read, polls once more, and waits for its bell. A writer reads that word
afterwards, and rings where the process sleeps. Each of the two writes before it reads, with a fence between, so that
one of them sees the other.
"""

from __future__ import annotations

import mmap
import os
import platform
import select
import socket
import threading
from collections.abc import Callable

from rocserve.plane import anonymous_file

KEEPS_STORE_ORDER = platform.machine().lower() in ("x86_64", "amd64")
"""Whether other processors see what this one stores in the order of the program."""

_RINGS_AT_ONCE = 4096
"""Of one byte each."""

_lock = threading.Lock()


def fence() -> None:
    """Keeps what was stored before apart from what is loaded or stored after. Taking a lock is a compare-and-swap: a
    full fence on x86. On Arm giving it back orders all that came before it, and taking it again all that comes after,
    and these two are never exchanged (store-release, load-acquire)."""
    _lock.acquire()
    _lock.release()
    if not KEEPS_STORE_ORDER:
        _lock.acquire()
        _lock.release()


class Doorbell:
    """What a loop sleeps on: it wakes for descriptors, and for other threads of its process, which ring."""

    def __init__(self, name: str) -> None:
        self.sleeps = anonymous_file.create(name, mmap.PAGESIZE)
        """A file of one page, for all to read whose descriptors it wakes for. Its word counts: even = awake, odd =
        asleep, a new one each time."""
        self._word = anonymous_file.map_to_write(self.sleeps).cast("Q")
        self._rung = 0
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._bell, select.EPOLLIN)

    def also_wake_for(self, descriptor: int) -> None:
        """`sleep` ends too when this one can be read."""
        self._epoll.register(descriptor, select.EPOLLIN)

    def no_longer_wake_for(self, descriptor: int) -> None:
        self._epoll.unregister(descriptor)

    def sleep(self, seconds: float | None, has_mail: Callable[[], bool]) -> bool:
        """Until somebody rings, another descriptor can be read, or the time is over (None = it never is); at once when
        there is mail. Returns: whether something came."""
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

    def ring(self) -> None:
        """To be called after something was left to it, from any thread. Rings once for each time that it sleeps."""
        fence()
        asleep = self._word[0]
        if asleep & 1 and asleep != self._rung:
            self._rung = asleep
            os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        self._epoll.close()
        os.close(self._bell)
        os.close(self.sleeps)


def sleep_word(sleeps: int) -> memoryview:
    """Another process's word, to read. The descriptor stays the caller's."""
    return anonymous_file.map_to_read(sleeps).cast("Q")[:1]


class SocketRinger:
    """Rings the thread that sleeps on the other end of a socket, which also shows when that end is gone.

    A socket of their own is what keeps one worker from taking away the rings of another.
    """

    def __init__(self, sleep_word: memoryview, connection: socket.socket) -> None:
        """`sleep_word`: the other's, to read."""
        self._word = sleep_word
        self._connection = connection
        self._rung = 0

    def ring(self) -> None:
        """To be called after the last of several messages. Rings once for each time that the other sleeps."""
        fence()
        asleep = self._word[0]
        if asleep & 1 and asleep != self._rung:
            self._rung = asleep
            try:
                self._connection.send(b"!", socket.MSG_DONTWAIT)
            except OSError:
                pass  # It is full of rings, or the other end is gone, which its reader finds out.


class SocketSleeper:
    """The side that sleeps on a socket."""

    def __init__(
        self, sleep_word: memoryview, connection: socket.socket, drain: Callable[[socket.socket], bool]
    ) -> None:
        """`sleep_word`: its own. `drain`: `drain_rings`, or what takes more than rings from the socket."""
        self._word = sleep_word
        self._connection = connection
        self._drain = drain
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._is_rung = False

    def sleep(self, seconds: float | None, has_mail: Callable[[], bool]) -> bool:
        """Until somebody rings or the time is over, at once when there is mail. Returns: False: the other end is gone;
        a sleep that begins afterwards finds it."""
        word = self._word
        word[0] += 1
        fence()
        try:
            # The rings of the sleep before: what it was woken for went first.
            is_there = not self._is_rung or self._drain(self._connection)
            if has_mail():
                return True
            if is_there:
                self._is_rung = bool(self._poll.poll(None if seconds is None else seconds * 1000))
            return is_there
        finally:
            word[0] += 1


def drain_rings(connection: socket.socket) -> bool:
    """Take the rings that are there. Returns: False: the other end is gone."""
    try:
        return bool(connection.recv(_RINGS_AT_ONCE, socket.MSG_DONTWAIT))
    except BlockingIOError:
        return True
    except OSError:
        return False
