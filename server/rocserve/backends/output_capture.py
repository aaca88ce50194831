"""Captures what libraries write to standard error or standard output: MIGraphX and ONNX Runtime report some errors only
there, and MIGraphX prints programs there."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

STANDARD_OUTPUT, STANDARD_ERROR = 1, 2


class CapturedText:
    """Has what was written, once the capture has ended."""

    text = ""


class OutputCapture:
    """Captures what any code writes to a descriptor. The descriptor is the process's, so the text of other threads is
    captured too, and a capture waits for the one before. An anonymous file replaces the descriptor meanwhile. Only a
    standard error that is an anonymous file itself (made by the parent, to read it) stays, and keeps the text, also
    that from before an abort."""

    def __init__(self, descriptor: int = STANDARD_ERROR) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    @contextmanager
    def captured(self) -> Iterator[CapturedText]:
        """A context whose output is captured."""
        found = CapturedText()
        with self._lock:
            start = _size_of_anonymous_file() if self._descriptor == STANDARD_ERROR else -1
            if start >= 0:
                try:
                    yield found
                finally:
                    found.text = _read(STANDARD_ERROR, start)
                return
            with ExitStack() as at_the_end:
                file = os.memfd_create("rocserve:messages")
                at_the_end.callback(os.close, file)
                # Without O_APPEND, two threads that write at the same time may write to the same position.
                fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
                try:
                    kept = os.dup(self._descriptor)
                except OSError as error:
                    if error.errno != errno.EBADF:
                        raise
                    kept = os.open(os.devnull, os.O_WRONLY)  # It is closed, so a sink replaces it afterwards.
                at_the_end.callback(os.close, kept)
                os.dup2(file, self._descriptor)
                try:
                    yield found
                finally:
                    os.dup2(kept, self._descriptor)
                    found.text = _read(file, 0)


def _read(file: int, start: int) -> str:
    with suppress(OSError):  # Other code may have redirected the descriptor meanwhile.
        return os.pread(file, os.fstat(file).st_size - start, start).decode(errors="replace")
    return ""


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
