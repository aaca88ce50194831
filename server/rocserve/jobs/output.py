"""What a job's child writes to its standard output and error.

It goes to a file without a name in memory, not to a pipe: what the child wrote before it was killed is there, a child
never waits for its reader, and it can read back what a call into the engine has written.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence

from rocserve.core.printable import printable

_READ_BYTES = 256 * 1024
_MOST_KEPT_BYTES = 16 << 20
"""The file is emptied beyond this; an engine's traces may run to gigabytes."""
_LONGEST_LINE = 2000
_KEPT_LINES = 12


class JobOutput:
    """Reads what one child writes. One thread at a time."""

    def __init__(self) -> None:
        memory = os.memfd_create("rocserve:job", os.MFD_CLOEXEC)
        try:
            # Opened anew to append: writing then goes on at the end also after the file has been emptied.
            self.descriptor = os.open(f"/proc/self/fd/{memory}", os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        finally:
            os.close(memory)
        self._read = 0
        self._begun = b""
        self._last: deque[str] = deque(maxlen=_KEPT_LINES)

    @property
    def last_lines(self) -> Sequence[str]:
        """The last that were not empty."""
        return tuple(self._last)

    def take_lines(self, *, ended: bool = False) -> list[str]:
        """The lines that have come since; with `ended` also one without an end."""
        lines = []
        while data := os.pread(self.descriptor, _READ_BYTES, self._read):
            self._read += len(data)
            *complete, self._begun = (self._begun + data).split(b"\n")
            lines += complete
            if len(self._begun) > _READ_BYTES:
                self._begun = self._begun[:_LONGEST_LINE]
        if self._read > _MOST_KEPT_BYTES:
            os.ftruncate(self.descriptor, 0)
            self._read = 0
        if ended:
            lines.append(self._begun)
            self._begun = b""
        readable = [_readable(line) for line in lines if line.strip()]
        self._last.extend(readable)
        return readable

    def close(self) -> None:
        os.close(self.descriptor)


def _readable(line: bytes) -> str:
    text = printable(line[:_LONGEST_LINE].decode("utf-8", "backslashreplace").rstrip())
    return text if len(line) <= _LONGEST_LINE else f"{text} ... (cut)"
