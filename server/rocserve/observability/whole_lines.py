"""Writes lines to a descriptor, each in one call of the kernel."""

from __future__ import annotations

import os
import select
from collections.abc import Callable


class WholeLines:
    """A stream for handlers of `logging`. Nothing is buffered, so every logged line is written even if the process is
    killed right after, and lines of several processes do not mix. If a line can be written only in part, because the
    disk is full, `take_back` is called with the number of its bytes that were written."""

    encoding = "utf-8"

    def __init__(self, descriptor: int, take_back: Callable[[int], None] | None = None) -> None:
        self._descriptor = descriptor
        self._take_back = take_back

    def fileno(self) -> int:
        return self._descriptor

    def write(self, text: str) -> None:
        """Write text that ends with the end of a line. Raises OSError."""
        for line in text.encode(errors="backslashreplace").splitlines(keepends=True):
            self._write_line(line)

    def _write_line(self, line: bytes) -> None:
        written = 0
        try:
            while written < len(line):
                try:
                    written += os.write(self._descriptor, line[written:])
                except BlockingIOError:
                    # The parent process may have made the standard error non-blocking.
                    select.select((), (self._descriptor,), ())
        except OSError:
            if written and self._take_back is not None:
                self._take_back(written)
            raise

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""

    def close(self) -> None:
        os.close(self._descriptor)
