"""Guarded mappings survive when another process shortens the mapped file: zeros replace the missing part.

A thread gets SIGBUS, which ends its process, if it touches a page beyond the end of a mapped file, or a page for which
the file system has no room. Here a handler replaces that page and the following ones by zeros. The thread goes on, and
checks afterwards whether this has happened. The kernel's own copies (pread, pwrite) return an error instead, but take
three to four times as long.

The handler is Python code that libffi calls in the middle of the code that touched the page. That is safe, because such
memory is only copied, by C functions that hold no lock but the GIL and may call Python.
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

_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.POINTER(ctypes.c_size_t), ctypes.c_void_p)


class _SignalAction(ctypes.Structure):
    """struct sigaction of glibc and musl on 64 bits."""

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
    """The state of a mapping. Mutable, because it may be torn at any time."""

    begin: int
    end: int
    """Addresses, at page boundaries."""
    is_torn: bool = False
    """Zeros have replaced a missing part: the mapping no longer shows the file."""


class FaultGuard:
    """Maps other processes' files and handles SIGBUS: one object per process for life, as signal handlers are. Safe on
    any thread."""

    def __init__(self) -> None:
        self._mappings: dict[int, GuardedMapping] = {}
        self._handler = _Handler(self._on_fault)
        self._previous: _SignalAction | None = None
        """The signal's handler before the first mapping."""

    def map(self, descriptor: int, size: int, to_write: bool) -> tuple[memoryview, GuardedMapping]:
        """Map a file while a view of it exists. Raises OSError."""
        if self._previous is None:
            self._previous = _SignalAction()
            handler = ctypes.cast(self._handler, ctypes.c_void_p)
            # SA_SIGINFO of signal.h: the handler gets the address.
            _libc.sigaction(signal.SIGBUS, _SignalAction(handler, flags=4), self._previous)
        view = anonymous_file.map_file(descriptor, to_write, size)
        begin = np.frombuffer(view, np.uint8).ctypes.data
        mapping = GuardedMapping(begin, begin + (size + mmap.PAGESIZE - 1 & -mmap.PAGESIZE))
        self._mappings[begin] = mapping
        # The memory is unmapped when the last view is gone, and the array goes with the last view.
        weakref.finalize(view.obj, self._mappings.pop, begin).atexit = False
        return view, mapping

    def _on_fault(self, number: int, information: ctypes._Pointer[ctypes.c_size_t], context: int) -> None:
        # siginfo_t has the address in its third word of 64 bits.
        address = information[2]
        # A copy, made in one step, because other threads change the dict meanwhile.
        for mapping in tuple(self._mappings.values()):
            if mapping.begin <= address < mapping.end:
                page = address & -mmap.PAGESIZE
                mapping.is_torn = True
                # A fault for each page would take long, and memory for gigabytes of zeros may not exist.
                if anonymous_file.replace_by_zeros(page, min(mapping.end - page, 64 << 20)):
                    return
        # The access is repeated, and now SIGBUS ends the process as it would have done without this handler.
        _libc.sigaction(signal.SIGBUS, self._previous, None)


class GuardedFile:
    """A file of another process, mapped from its beginning. Safe on any thread."""

    _descriptor = -1

    def __init__(self, guard: FaultGuard, descriptor: int, size: int, to_write: bool) -> None:
        """Takes over the descriptor and closes it with the object, unless it raises OSError."""
        self._guard = guard
        self._to_write = to_write
        self.size = size
        self._view, self.mapping = guard.map(descriptor, size, to_write)
        self._descriptor = descriptor

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return a part, which outlives this object. A torn mapping is replaced by a new one."""
        if self.mapping.is_torn:
            self._view, self.mapping = self._guard.map(self._descriptor, self.size, self._to_write)
        return self._view[offset : offset + nbytes]

    @property
    def current_size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def open_for_reading(self) -> int:
        """Open a new descriptor for another process; the caller owns it. Raises OSError."""
        return anonymous_file.open_for_reading(self._descriptor)
