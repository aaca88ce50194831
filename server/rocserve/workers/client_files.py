"""Files of clients, parts of which a worker reads where they lie: how it is given them, for each instance.

A file goes once, as a descriptor to read, behind the instance's rings on their socket, with its size; both ends number
files as they go.
"""

from __future__ import annotations

import os
import socket
import struct
import weakref
from collections.abc import Callable
from typing import Any

from rocserve.core.passed_descriptors import descriptors_of, send_with_descriptors
from rocserve.plane.guarded_mapping import FaultGuard, GuardedFile
from rocserve.plane.heap import HeapReader

_SIZE = struct.Struct("<Q")
_MOST_FILES = 256
"""Of an instance at a time: each takes a descriptor and a mapping in its worker."""
_MOST_BYTES = 4096
"""Taken at once: rings, a byte each, and a size."""
_MOST_RESIDENT = 256 << 20
"""Bytes of clients' files that count as an instance's memory, beside those of one batch."""
_ROOM = socket.CMSG_LEN(4)
"""Bytes of one descriptor."""
_FLAGS = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC


class GivenFiles:
    """The server's end. On the data plane's thread."""

    def __init__(self, connection: socket.socket, on_gone: Callable[[int], None]) -> None:
        """`on_gone`: takes, on any thread, the number of a file that nobody holds here any more."""
        self._connection = connection
        self._on_gone = on_gone
        self._numbers: weakref.WeakKeyDictionary[GuardedFile, int] = weakref.WeakKeyDictionary()
        self._ends: dict[int, weakref.finalize[Any, Any]] = {}
        self._given = 0

    def number(self, file: GuardedFile) -> int:
        """By which the worker knows the file; 0: it cannot be given it now."""
        number = self._numbers.get(file, 0)
        if not number and len(self._numbers) < _MOST_FILES:
            try:
                descriptor = file.open_for_reading()
                try:
                    send_with_descriptors(self._connection, _SIZE.pack(file.size), (descriptor,), socket.MSG_DONTWAIT)
                finally:
                    os.close(descriptor)
            except OSError:
                return 0
            self._given += 1
            number = self._numbers[file] = self._given
            end = self._ends[number] = weakref.finalize(file, self._on_gone, number)
            end.atexit = False
        return number

    def forget(self, number: int) -> None:
        """The worker has been told to let go of the file."""
        del self._ends[number]

    def close(self) -> None:
        """The worker has ended."""
        for end in self._ends.values():
            end.detach()
        # It knows the instance, which would stay until the garbage collector comes by.
        self._on_gone = lambda number: None


class TakenFiles(dict[int, HeapReader | GuardedFile]):
    """The worker's end: what inputs lie in, the files by their numbers, 0 = the heap. On the instance's thread."""

    def __init__(self, heap: HeapReader, guard: FaultGuard) -> None:
        super().__init__({0: heap})
        self._guard = guard
        self._taken = 0
        self._resident = 0

    def take(self, connection: socket.socket) -> bool:
        """Take the rings that are there, and a file behind them. Returns: False: the other end is gone."""
        try:
            # Written out: it runs for each lone request.
            data, rights, _, _ = connection.recvmsg(_MOST_BYTES, _ROOM, _FLAGS)
        except BlockingIOError:
            return True
        except OSError:
            return False
        for descriptor in descriptors_of(rights) if rights else ():
            self._taken += 1
            # The kernel ends what is read at once behind a descriptor's message.
            (size,) = _SIZE.unpack(data[-_SIZE.size :])
            self[self._taken] = GuardedFile(self._guard, descriptor, size, to_write=False)
        return bool(data)

    def read(self, nbytes: int) -> None:
        """Bytes of a file are about to be read. What has been read counts as the worker's memory, which may be bounded,
        until it is left; to read it again takes longer then."""
        self._resident += nbytes
        if self._resident > _MOST_RESIDENT:
            self._resident = nbytes
            files = [file for file in self.values() if isinstance(file, GuardedFile)]
            if sum(file.size for file in files) > _MOST_RESIDENT:
                for file in files:
                    file.leave()
