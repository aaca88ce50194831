"""Guarded mapping is a file that another process may cut at any time; the missing part turns into zeros.

A thread that touches a page beyond the end of a mapped file, or one that its file system has no room for, gets SIGBUS,
which ends a process. Here a handler puts zeros in the place of that page and of those behind it; the thread goes on,
and asks afterwards whether that has happened. The kernel's own copies (pread, pwrite) return an error instead, and take
three to four times as long.

The handler is Python code that libffi calls, in the midst of the code that touched the page. It may run there: such
memory is only copied to and from, by C functions that hold no lock but Python's, and those may call back into Python.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import weakref
from dataclasses import dataclass

import numpy as np

from rocserve.plane import anonymous_file

_SA_SIGINFO = 4
"""Of signal.h: the handler is given the address."""
_ADDRESS_WORD = 2
"""Where it stands in siginfo_t, in words of 64 bits."""
_REPLACED_AT_ONCE = 64 << 20
"""Bytes: a fault for each page would take long, and memory for gigabytes may not be had."""

_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.POINTER(ctypes.c_size_t), ctypes.c_void_p)


class _SignalAction(ctypes.Structure):
    """struct sigaction of glibc and musl, on 64 bits."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_libc = ctypes.PyDLL(None, use_errno=True)
_libc.sigaction.argtypes = (ctypes.c_int, ctypes.POINTER(_SignalAction), ctypes.POINTER(_SignalAction))


@dataclass(slots=True, eq=False)
class GuardedMapping:
    """State of a mapping. Not frozen, for it may be torn at any time."""

    begin: int
    end: int
    """Addresses, of whole pages."""
    is_torn: bool = False
    """Zeros stand in the place of what was touched and was not there; the file is no longer to be had by it."""


class FaultGuard:
    """Maps files of others. A process has one and keeps it until it ends, since signals are the process's. Safe on any
    thread."""

    def __init__(self) -> None:
        self._mappings: dict[int, GuardedMapping] = {}
        self._handler = _Handler(self._on_fault)
        self._previous: _SignalAction | None = None
        """What was done about the signal before the first mapping."""

    def map(self, descriptor: int, size: int, to_write: bool) -> tuple[memoryview, GuardedMapping]:
        """A file, mapped until nobody holds a view any more. Raises: OSError."""
        if self._previous is None:
            self._previous = _SignalAction()
            handler = ctypes.cast(self._handler, ctypes.c_void_p)
            _libc.sigaction(signal.SIGBUS, _SignalAction(handler, flags=_SA_SIGINFO), self._previous)
        view = (anonymous_file.map_to_write if to_write else anonymous_file.map_to_read)(descriptor, size)
        begin = np.frombuffer(view, np.uint8).ctypes.data
        mapping = GuardedMapping(begin, begin + (size + mmap.PAGESIZE - 1 & -mmap.PAGESIZE))
        self._mappings[begin] = mapping
        # With the array goes the last view, and only then the memory is unmapped.
        weakref.finalize(view.obj, self._mappings.pop, begin).atexit = False
        return view, mapping

    def _on_fault(self, number: int, information: ctypes._Pointer[ctypes.c_size_t], context: int) -> None:
        address = information[_ADDRESS_WORD]
        # A copy, made in one step: other threads go on meanwhile.
        for mapping in tuple(self._mappings.values()):
            if mapping.begin <= address < mapping.end:
                page = address & -mmap.PAGESIZE
                mapping.is_torn = True
                if anonymous_file.put_zeros(page, min(mapping.end - page, _REPLACED_AT_ONCE)):
                    return
        # It comes again, and ends the process as it would have done before.
        _libc.sigaction(signal.SIGBUS, self._previous, None)


class GuardedFile:
    """A file of another process, mapped from its beginning on. Safe on any thread."""

    _descriptor = -1

    def __init__(self, guard: FaultGuard, descriptor: int, size: int, to_write: bool) -> None:
        """Takes over the descriptor, which is closed with the last reference to this; not where it raises OSError."""
        self._guard = guard
        self._to_write = to_write
        self.size = size
        self._view, self.mapping = guard.map(descriptor, size, to_write)
        self._descriptor = descriptor

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """A part, which stays valid when this goes. Of a mapping that is torn another takes the place."""
        if self.mapping.is_torn:
            self._view, self.mapping = self._guard.map(self._descriptor, self.size, self._to_write)
        return self._view[offset : offset + nbytes]

    def leave(self) -> None:
        """Its pages count as this process's no more, until they are touched again."""
        anonymous_file.leave(self.mapping.begin, self.mapping.end - self.mapping.begin)

    @property
    def bytes_left(self) -> int:
        """The size that the file has now."""
        return os.fstat(self._descriptor).st_size

    def open_for_reading(self) -> int:
        """A new descriptor for another process; it belongs to the caller. Raises: OSError."""
        return anonymous_file.open_for_reading(self._descriptor)
