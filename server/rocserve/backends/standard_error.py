"""Captures what libraries write to descriptor 2: MIGraphX and ONNX Runtime report some errors only there."""

from __future__ import annotations

import fcntl
import os
import stat
import threading
from contextlib import suppress

STANDARD_ERROR = 2


class StandardErrorCapture:
    """Captures what any code writes to descriptor 2 between `begin` and `end`. Thread-safe; calls may overlap. If
    descriptor 2 is an anonymous file (made by the parent, to read it), the text is read from it, and text from before
    an abort stays in it. Otherwise an anonymous file replaces descriptor 2 while calls run. The descriptor is the
    process's, so the text of other threads is captured too, and overlapping calls see each other's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file = -1
        self._under_way = 0
        self._kept = -1
        """The original standard error while it is replaced; else -1."""

    def begin(self) -> int:
        """Return the start position for `end`."""
        with self._lock:
            self._under_way += 1
            if self._under_way > 1:
                return os.fstat(STANDARD_ERROR).st_size
            size = _size_of_anonymous_file()
            if size >= 0:
                return size
            if self._file < 0:
                self._file = os.memfd_create("rocserve:messages")
                # Without O_APPEND, two threads that write at the same time may write to the same position.
                fcntl.fcntl(self._file, fcntl.F_SETFL, os.O_APPEND)
            try:
                self._kept = os.dup(STANDARD_ERROR)
            except OSError:
                self._kept = os.open(
                    os.devnull, os.O_WRONLY
                )  # standard error is closed, so a sink replaces it afterwards
            os.dup2(self._file, STANDARD_ERROR)
            return 0

    def end(self, start: int) -> str:
        """Return what was written since `begin` returned `start`."""
        with self._lock:
            size = os.fstat(STANDARD_ERROR).st_size
            text = ""
            if size > start:
                readable = STANDARD_ERROR if self._kept < 0 else self._file
                with suppress(OSError):  # other code may have redirected the descriptor meanwhile
                    text = os.pread(readable, size - start, start).decode(errors="replace")
            self._under_way -= 1
            if self._under_way == 0 and self._kept >= 0:
                os.dup2(self._kept, STANDARD_ERROR)
                os.close(self._kept)
                self._kept = -1
                if size:
                    os.ftruncate(self._file, 0)
            return text


def _size_of_anonymous_file() -> int:
    """Return the file's size; -1 if standard error is not an anonymous file, or cannot be read."""
    try:
        state = os.fstat(STANDARD_ERROR)
    except OSError:
        return -1
    if not stat.S_ISREG(state.st_mode) or state.st_nlink > 0:
        return -1
    readable = fcntl.fcntl(STANDARD_ERROR, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
    return state.st_size if readable else -1
