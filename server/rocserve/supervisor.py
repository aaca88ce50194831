"""The supervisor: the process that the user starts. It starts the server's process and, when that dies, another.

It does nothing else, so that nothing else can end it: one thread, the standard library, no request, no model. The
server's process is a fork of it, before anything has been imported. When the supervisor ends, however that happens, the
pipe that it holds alone closes, and the kernel ends all the others (core/exit_with_parent.py).

Signals go to the supervisor, which hands their numbers on; the server's process passes over those that reach it with
its whole group. What the next server is to know, and to have of descriptors, each leaves with the supervisor.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from rocserve.core.passed_descriptors import receive_with_descriptors

_ENDING = (signal.SIGTERM, signal.SIGINT)
_MOST_DESCRIPTORS = 4
_MESSAGE_BYTES = 1 << 20
_FIRST_PAUSE_SECONDS = 0.1
"""After a server that has not come to serve, or to be; after each further one the pause is twice the last."""
_LONGEST_PAUSE_SECONDS = 5.0


class Post(NamedTuple):
    """What a server's process has of its supervisor."""

    connection: socket.socket
    """Signals come by it, a byte each; what is left for the next server goes, a message each."""
    parent_pipe: int
    """The reading end of the pipe that breaks with the supervisor."""
    left: bytes
    """By the server before; empty = there was none."""
    descriptors: tuple[int, ...]
    """Left with it."""
    end: str
    """Of the server before, in words."""


class Supervisor:
    def __init__(self, serve: Callable[[Post], int]) -> None:
        """`serve`: runs the server in its process; returns its exit status."""
        self._serve = serve
        self._parent_pipe, self._parent_pipe_writer = os.pipe2(os.O_CLOEXEC)
        # Workers open it anew, other users' as well.
        os.fchmod(self._parent_pipe, 0o444)
        self._woken, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._connection: socket.socket | None = None
        """To the server that runs."""
        self._serves = False
        """It has left something for the next one."""
        self._left = b""
        self._descriptors: tuple[int, ...] = ()
        self._asked_to_end = 0

    def run(self) -> int:
        """The exit status; in the server's process its own."""
        signal.set_wakeup_fd(self._waker)
        for number in (signal.SIGCHLD, signal.SIGHUP, *_ENDING):
            # Where one is ignored from the start (nohup) it stays so; but without SIGCHLD no end would be noticed.
            if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *_: None)  # The wake-up pipe reports it.
        end, pause = "", 0.0
        while True:
            if pause and not self._rest(pause):
                return 0
            pause = min(max(2 * pause, _FIRST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS)
            self._serves = False
            own, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                server = os.fork()
            except OSError as error:
                own.close()
                peer.close()
                if not end:
                    print(f"rocserve serve: the server's process cannot be started: {error.strerror}", file=sys.stderr)
                    return 1
                # There is no room for a process now. What serves the next server is kept.
                continue
            if not server:
                own.close()
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for descriptor in (self._woken, self._waker, self._parent_pipe_writer):
                    os.close(descriptor)
                return self._serve(Post(peer, self._parent_pipe, self._left, self._descriptors, end))
            peer.close()
            status = self._attend(server, own)
            # What ends the first by itself, a flag or a model at the start, would end all that follow.
            if self._asked_to_end or not self._left or (status >= 0 and not end):
                return status if status >= 0 else 128 - status
            end = f"was killed by {_name(-status)}" if status < 0 else f"ended with status {status}"
            if self._serves:
                pause = 0.0

    def _attend(self, server: int, connection: socket.socket) -> int:
        """Until this server has ended: its exit status, negative = the signal that killed it."""
        with connection:
            poll = select.poll()
            poll.register(self._woken, select.POLLIN)
            poll.register(connection, select.POLLIN)
            while True:
                ready = [descriptor for descriptor, _ in poll.poll()]
                if connection.fileno() in ready and not self._keep(connection):
                    poll.unregister(connection)
                if self._woken in ready and (status := self._take_signals(server, connection)) is not None:
                    while self._keep(connection):
                        pass
                    return status

    def _keep(self, connection: socket.socket) -> bool:
        """What the server leaves. False: there is nothing more, now or for good."""
        try:
            left, descriptors = receive_with_descriptors(
                connection, _MESSAGE_BYTES, _MOST_DESCRIPTORS, socket.MSG_DONTWAIT
            )
        except OSError:
            return False
        if not left:
            return False
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._left, self._descriptors, self._serves = left, tuple(descriptors), True
        return True

    def _take_signals(self, server: int, connection: socket.socket) -> int | None:
        """Hand them on. The server's status where it has ended."""
        for number in self._read_signals():
            with suppress(OSError):
                connection.send(bytes((number,)), socket.MSG_DONTWAIT)
        status = None
        with suppress(ChildProcessError):
            # As the first process of a container it has to reap all that others leave behind.
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == server:
                    status = os.waitstatus_to_exitcode(ended[1])
        return status

    def _read_signals(self) -> list[int]:
        """Those that are for the server. The third that asks for the end has its own effect."""
        taken = [number for number in os.read(self._woken, 4096) if number != signal.SIGCHLD]
        self._asked_to_end += sum(number in _ENDING for number in taken)
        if self._asked_to_end > 2:
            signal.signal(taken[-1], signal.SIG_DFL)
            os.kill(os.getpid(), taken[-1])
            os._exit(128 + taken[-1])  # The first process of a container is spared by its own signals.
        return taken

    def _rest(self, seconds: float) -> bool:
        """False: it is to end."""
        until = time.monotonic() + seconds
        while not self._asked_to_end and (left := until - time.monotonic()) > 0:
            if select.select((self._woken,), (), (), left)[0]:
                self._read_signals()
        return not self._asked_to_end


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
