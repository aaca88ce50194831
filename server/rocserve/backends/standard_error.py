"""What a library writes to descriptor 2 during a call: MIGraphX and ONNX Runtime report some errors nowhere else."""

from __future__ import annotations

import fcntl
import os
import stat
import threading
from contextlib import suppress

STANDARD_ERROR = 2


class StandardErrorCapture:
    """Takes what any code writes to descriptor 2 between `begin` and `end`. Safe on several threads, calls may overlap.

    Where descriptor 2 is an anonymous file (made by the starter of this process, to read it), nothing is redirected:
    the text is read there, and text from before an abort stays in it. Anything else is exchanged for an anonymous file
    of our own while calls are under way. The descriptor is the process's, so what other threads write meanwhile is
    taken too, and what overlapping calls write is seen by each of them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file = -1
        self._under_way = 0
        self._kept = -1
        """The real standard error while it is exchanged; else -1."""

    def begin(self) -> int:
        """Gives what `end` takes."""
        with self._lock:
            self._under_way += 1
            if self._under_way > 1:
                return os.fstat(STANDARD_ERROR).st_size
            size = _size_of_anonymous_file()
            if size >= 0:
                return size
            if self._file < 0:
                self._file = os.memfd_create("rocserve:messages")
                # Without it two threads that write at once may write to the same place.
                fcntl.fcntl(self._file, fcntl.F_SETFL, os.O_APPEND)
            try:
                self._kept = os.dup(STANDARD_ERROR)
            except OSError:
                self._kept = os.open(os.devnull, os.O_WRONLY)  # it is closed: it is given one that leads nowhere
            os.dup2(self._file, STANDARD_ERROR)
            return 0

    def end(self, start: int) -> str:
        """What was written since `begin` gave `start`."""
        with self._lock:
            size = os.fstat(STANDARD_ERROR).st_size
            text = ""
            if size > start:
                readable = STANDARD_ERROR if self._kept < 0 else self._file
                with suppress(OSError):  # somebody has led the descriptor elsewhere meanwhile
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
    """-1: standard error is none, or one that cannot be read."""
    try:
        state = os.fstat(STANDARD_ERROR)
    except OSError:
        return -1
    if not stat.S_ISREG(state.st_mode) or state.st_nlink > 0:
        return -1
    readable = fcntl.fcntl(STANDARD_ERROR, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
    return state.st_size if readable else -1
