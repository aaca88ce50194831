"""Passes files and heaps to the other end of a link, which reads tensors there in place: clients' files and other
workers' heaps to a worker. Each file or heap is passed once, as a read-only descriptor with its size (0 for a heap),
through the socket that also carries the doorbell's rings. Both ends number files and heaps in their order."""

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
"""Bound for each instance, because each file takes a descriptor and a mapping in the worker."""
_RIGHTS_BYTES = socket.CMSG_LEN(4)
_CLOSE_ON_EXEC, _WAS_CUT = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CTRUNC)
"""As int, because the enum's operators take microseconds."""


class PassedFiles:
    """The server's end: passes files to the worker. On the data plane's thread."""

    def __init__(self, connection: socket.socket, on_gone: Callable[[int], None]) -> None:
        """`on_gone`: called on any thread, with the number of a file that the server no longer holds."""
        self._connection = connection
        self._on_gone = on_gone
        self._numbers: dict[weakref.ref[GuardedFile | HeapReader], int] = {}
        self._last_number = 0

    def number(self, file: GuardedFile | HeapReader) -> int:
        """Return the worker's number for the file, after passing the file if needed; 0 = it cannot be passed now."""
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
            self._last_number += 1
            number = self._numbers[weakref.ref(file, self._file_gone)] = self._last_number
        return number

    def _file_gone(self, reference: weakref.ref[GuardedFile | HeapReader]) -> None:
        # `close` may have cleared the table on another thread.
        if number := self._numbers.pop(reference, 0):
            self._on_gone(number)

    def close(self) -> None:
        """Forget all files after the worker has ended."""
        # The weak references and `_on_gone` are cycles, which otherwise only a garbage collection would free.
        self._numbers.clear()
        self._on_gone = lambda number: None


class ReceivedFiles(dict[int, HeapReader | GuardedFile]):
    """The worker's end: the sources of inputs by number; 0 = the version's heap. On the instance's thread."""

    def __init__(self, heap: HeapReader, guard: FaultGuard) -> None:
        super().__init__({0: heap})
        self._guard = guard
        self._last_number = 0

    def take(self, connection: socket.socket, flags: int = socket.MSG_DONTWAIT) -> bool:
        """Receive bytes of the doorbell, and a file if one follows. `flags`: 0 = wait. Returns False if the server is
        gone. Raises OSError if a received file cannot be opened or mapped."""
        try:
            # Not receive_with_descriptors: each lone request would pay for the call.
            # 4096 bytes: doorbell rings of one byte each, and a size.
            data, rights, state, _ = connection.recvmsg(4096, _RIGHTS_BYTES, int(flags) | _CLOSE_ON_EXEC)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if state & _WAS_CUT:
            # The kernel has dropped a descriptor, so the numbers of later files would be wrong.
            raise OSError(errno.EMFILE, "a client's file was lost: this process has reached its limit of open files")
        for descriptor in descriptors_of(rights) if rights else ():
            self._last_number += 1
            # The kernel ends a receive after a message with a descriptor, so the size comes last.
            (size,) = _SIZE.unpack(data[-_SIZE.size :])
            if size:
                self[self._last_number] = GuardedFile(self._guard, descriptor, size, to_write=False)
            else:
                self[self._last_number] = HeapReader(descriptor)
        return bool(data)

    def forget(self, number: int) -> None:
        file = self.pop(number)
        if isinstance(file, HeapReader):
            file.close()
