"""Memory of GPUs that clients share: a process opens it, so that the server's own has no part of a GPU's libraries."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import threading

from rocserve.core.errors import ServeError, invalid_argument, unavailable
from rocserve.plane import anonymous_file
from rocserve.services.client_memory import device_process
from rocserve.services.client_memory.device_process import CLOSE, DONE, OPEN, READ, REQUEST, WRITE

COPIED_AT_ONCE = 4 << 20
"""Bytes: a millisecond's work, of which the data plane has some a turn."""
_START_SECONDS = 120.0
"""PyTorch is imported, and a GPU's driver started."""
_ANSWER_SECONDS = 5.0
_LONGEST_ANSWER = 4096
HANDLE_BYTES = 64


class DeviceProcess:
    """Asks the process; safe on any thread."""

    def __init__(self) -> None:
        """Takes seconds. Raises: ServeError: UNAVAILABLE, it does not start, or finds no GPU."""
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._is_given_up = False
        memory = anonymous_file.create("rocserve:devices", COPIED_AT_ONCE)
        self._memory = anonymous_file.map_to_write(memory)
        self._connection, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", device_process.__name__, str(peer.fileno()), str(memory)]
        try:
            self._process = subprocess.Popen(
                command, pass_fds=(peer.fileno(), memory), stdin=subprocess.DEVNULL, process_group=0
            )
        finally:
            peer.close()
            os.close(memory)
        self._answer(_START_SECONDS)

    @property
    def has_ended(self) -> bool:
        # The driver takes its time with one that was killed: its socket is closed long before.
        return self._is_given_up or self._process.poll() is not None

    def open(self, handle: bytes, device: int, nbytes: int) -> int:
        """The number of what has been opened. Raises: ServeError: INVALID_ARGUMENT, the driver's reason."""
        number = next(self._numbers)
        with self._lock:
            self._ask(OPEN, number, device, 0, nbytes, handle)
        return number

    def read(self, number: int, offset: int, data: memoryview) -> None:
        """Fill up to 4 MiB. Raises: ServeError, as `write`."""
        with self._lock:
            self._ask(READ, number, 0, offset, len(data))
            data[:] = self._memory[: len(data)]

    def write(self, number: int, offset: int, data: memoryview) -> None:
        """Raises: ServeError: INVALID_ARGUMENT, the driver's reason; UNAVAILABLE, the process has ended."""
        with self._lock:
            self._memory[: len(data)] = data
            self._ask(WRITE, number, 0, offset, len(data))

    def close(self, number: int) -> None:
        """Let go of what has been opened. Never waits."""
        try:
            self._connection.send(REQUEST.pack(CLOSE, number, 0, 0, 0, b""), socket.MSG_DONTWAIT)
        except OSError:
            pass  # It has ended, or will be ended for not reading.

    def _ask(self, kind: int, number: int, device: int, offset: int, nbytes: int, handle: bytes = b"") -> None:
        try:
            self._connection.send(REQUEST.pack(kind, number, device, offset, nbytes, handle))
        except OSError as error:
            raise self._ended(error) from None
        self._answer(_ANSWER_SECONDS)

    def _answer(self, seconds: float) -> None:
        self._connection.settimeout(seconds)
        try:
            answer = self._connection.recv(_LONGEST_ANSWER)
        except OSError as error:
            raise self._ended(error) from None
        if not answer:
            raise self._ended("it has closed its socket")
        if answer != DONE:
            raise invalid_argument(answer.decode(errors="replace"))

    def _ended(self, reason: object) -> ServeError:
        """One that has not answered in time is ended, for its next answer would be to another question."""
        self._is_given_up = True
        self._process.kill()
        return unavailable(f"the process that opens the memory of GPUs has ended ({reason}); register the region again")
