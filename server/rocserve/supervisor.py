"""The supervisor, the process that the user starts: starts the server's process, and a replacement when it dies.

It does nothing else, so that nothing else can end it: one thread, the standard library, no requests, no models. The
server's process is a fork of it, made before other modules are imported. The supervisor alone holds the writing end of
a pipe. When it ends, however that happens, the kernel ends all other processes (core/exit_with_parent.py).

The supervisor gets the signals and sends their numbers to the server's process, which ignores signals to its process
group. Each server's process keeps data and descriptors for its successor with the supervisor.
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
"""Pause before the replacement of a server that did not get to serve, or could not be forked; doubles each time."""
_LONGEST_PAUSE_SECONDS = 5.0


class ServerStart(NamedTuple):
    """What a server's process gets from its supervisor."""

    connection: socket.socket
    """The supervisor sends signals, a byte each; the server sends a Handover with descriptors, for the next server."""
    parent_pipe: int
    """The reading end of the supervisor's pipe."""
    handover: bytes
    """The previous server's Handover, as JSON; empty = this is the first."""
    descriptors: tuple[int, ...]
    previous_end: str
    """How the previous server ended, in words."""


class Supervisor:
    def __init__(self, serve: Callable[[ServerStart], int]) -> None:
        """`serve` runs the server in its process and returns its exit status."""
        self._serve = serve
        self._parent_pipe, self._parent_pipe_writer = os.pipe2(os.O_CLOEXEC)
        # Workers reopen it, and may run as other users.
        os.fchmod(self._parent_pipe, 0o444)
        self._woken, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._serves = False
        """Whether the running server has sent a Handover for the next one."""
        self._handover = b""
        self._descriptors: tuple[int, ...] = ()
        self._asked_to_end = 0

    def run(self) -> int:
        """Supervise until the end. Returns the exit status; in the server's process, that process's."""
        signal.set_wakeup_fd(self._waker)
        for number in (signal.SIGCHLD, signal.SIGHUP, *_ENDING):
            # A signal that was ignored from the start (nohup) stays ignored, except SIGCHLD: it reports a server's end.
            if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *_: None)  # The wake-up pipe reports the signal.
        end, pause = "", 0.0
        while True:
            if pause and not self._pause(pause):
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
                # No process can be created now. The data for the next server are kept.
                continue
            if not server:
                own.close()
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for descriptor in (self._woken, self._waker, self._parent_pipe_writer):
                    os.close(descriptor)
                return self._serve(ServerStart(peer, self._parent_pipe, self._handover, self._descriptors, end))
            peer.close()
            status = self._wait_for_end(server, own)
            # A first server that ends by itself, because of a flag or a model, would end the same way again.
            if self._asked_to_end or not self._handover or (status >= 0 and not end):
                return status if status >= 0 else 128 - status
            end = f"was killed by {_name(-status)}" if status < 0 else f"ended with status {status}"
            if self._serves:
                pause = 0.0

    def _wait_for_end(self, server: int, connection: socket.socket) -> int:
        """Wait for a server's end. Returns the exit status, or the negative number of the signal that killed it."""
        with connection:
            poll = select.poll()
            poll.register(self._woken, select.POLLIN)
            poll.register(connection, select.POLLIN)
            while True:
                ready = [descriptor for descriptor, _ in poll.poll()]
                if connection.fileno() in ready and not self._keep_message(connection):
                    poll.unregister(connection)
                if self._woken in ready and (status := self._take_signals(server, connection)) is not None:
                    while self._keep_message(connection):
                        pass
                    return status

    def _keep_message(self, connection: socket.socket) -> bool:
        """Keep a message of the server. Returns False if there is none now, or will be none any more."""
        try:
            handover, descriptors = receive_with_descriptors(
                connection, _MESSAGE_BYTES, _MOST_DESCRIPTORS, socket.MSG_DONTWAIT
            )
        except OSError:
            return False
        if not handover:
            return False
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._handover, self._descriptors, self._serves = handover, tuple(descriptors), True
        return True

    def _take_signals(self, server: int, connection: socket.socket) -> int | None:
        """Send signals to the server. Returns its status if it has ended."""
        for number in self._read_signals():
            with suppress(OSError):
                connection.send(bytes((number,)), socket.MSG_DONTWAIT)
        status = None
        with suppress(ChildProcessError):
            # The first process of a container must reap all orphans.
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == server:
                    status = os.waitstatus_to_exitcode(ended[1])
        return status

    def _read_signals(self) -> list[int]:
        """Return the signals for the server. The third request to end takes effect on the supervisor itself."""
        numbers = [number for number in os.read(self._woken, 4096) if number != signal.SIGCHLD]
        self._asked_to_end += sum(number in _ENDING for number in numbers)
        if self._asked_to_end > 2:
            signal.signal(numbers[-1], signal.SIG_DFL)
            os.kill(os.getpid(), numbers[-1])
            os._exit(128 + numbers[-1])  # The kernel ignores such a signal from a container's first process to itself.
        return numbers

    def _pause(self, seconds: float) -> bool:
        """Wait. Returns False if a signal asked to end."""
        until = time.monotonic() + seconds
        while not self._asked_to_end and (seconds_left := until - time.monotonic()) > 0:
            if select.select((self._woken,), (), (), seconds_left)[0]:
                self._read_signals()
        return not self._asked_to_end


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
