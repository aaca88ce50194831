"""Files of clients, and heaps of other workers, parts of which a worker reads where they lie: how it is given them, for
each instance.

A file goes once, as a descriptor to read, behind the instance's rings on their socket, with its size, which is 0 of a
heap; both ends number files as they go.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import weakref
from collections.abc import Callable

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
_CLOSE_ON_EXEC, _WAS_CUT = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CTRUNC)
"""Plain numbers: enum's operators take microseconds."""


class GivenFiles:
    """The server's end. On the data plane's thread."""

    def __init__(self, connection: socket.socket, on_gone: Callable[[int], None]) -> None:
        """`on_gone`: takes, on any thread, the number of a file that nobody holds here any more."""
        self._connection = connection
        self._on_gone = on_gone
        self._numbers: dict[weakref.ref[GuardedFile | HeapReader], int] = {}
        self._given = 0

    def number(self, file: GuardedFile | HeapReader) -> int:
        """By which the worker knows the file; 0: it cannot be given it now."""
        number = self._numbers.get(weakref.ref(file), 0)
        if not number and len(self._numbers) < _MOST_FILES:
            try:
                descriptor = file.open_for_reading()
                size = file.size if isinstance(file, GuardedFile) else 0
                try:
                    send_with_descriptors(self._connection, _SIZE.pack(size), (descriptor,), socket.MSG_DONTWAIT)
                finally:
                    os.close(descriptor)
            except OSError:
                return 0
            self._given += 1
            number = self._numbers[weakref.ref(file, self._file_gone)] = self._given
        return number

    def _file_gone(self, reference: weakref.ref[GuardedFile | HeapReader]) -> None:
        # `close` may have been here on the other thread.
        if number := self._numbers.pop(reference, 0):
            self._on_gone(number)

    def close(self) -> None:
        """The worker has ended."""
        # Its references to files and `_on_gone` are cycles, which only a garbage collection would end.
        self._numbers.clear()
        self._on_gone = lambda number: None


class TakenFiles(dict[int, HeapReader | GuardedFile]):
    """The worker's end: what inputs lie in, the files by their numbers, 0 = the version's heap. On the instance's
    thread."""

    def __init__(self, heap: HeapReader, guard: FaultGuard) -> None:
        super().__init__({0: heap})
        self._guard = guard
        self._taken = 0
        self._resident = 0

    def take(self, connection: socket.socket, flags: int = socket.MSG_DONTWAIT) -> bool:
        """Take the rings that are there, and a file behind them. `flags`: 0: wait for one of them. Returns: False: the
        other end is gone. Raises: OSError: a file has come and cannot be opened or mapped."""
        try:
            # Written out: it runs for each lone request.
            data, rights, state, _ = connection.recvmsg(_MOST_BYTES, _ROOM, int(flags) | _CLOSE_ON_EXEC)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if state & _WAS_CUT:
            # The kernel has dropped the descriptor, and later files would have the numbers of others.
            raise OSError(errno.EMFILE, "a client's file was lost: this process has as many files open as it may")
        for descriptor in descriptors_of(rights) if rights else ():
            self._taken += 1
            # The kernel ends what is read at once behind a descriptor's message.
            (size,) = _SIZE.unpack(data[-_SIZE.size :])
            if size:
                self[self._taken] = GuardedFile(self._guard, descriptor, size, to_write=False)
            else:
                self[self._taken] = HeapReader(descriptor)
        return bool(data)

    def forget(self, number: int) -> None:
        file = self.pop(number)
        if isinstance(file, HeapReader):
            file.close()

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
