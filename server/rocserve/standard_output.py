"""Writes the server's output no faster than it is read, so that a reader that stops does not stop the server."""

from __future__ import annotations

import asyncio
import io
import os
import select
import stat
from typing import TextIO


class Printed(io.TextIOWrapper):
    """Collects text for `stream`, with its answer to isatty(), and escapes characters that its encoding lacks."""

    def __init__(self, stream: TextIO) -> None:
        self._is_terminal = stream.isatty()
        self._kept = io.BytesIO()
        super().__init__(self._kept, stream.encoding, errors="backslashreplace")

    def isatty(self) -> bool:
        return self._is_terminal

    @property
    def octets(self) -> bytes:
        self.flush()
        return self._kept.getvalue()


class PatientWriter:
    """Writes on the event loop when the descriptor is writable. A thread that blocks in a write could not be ended."""

    def __init__(self, descriptor: int, octets: bytes) -> None:
        """Raises OSError."""
        self._left = memoryview(octets)
        self._loop = asyncio.get_running_loop()
        self._descriptor = _reopened(descriptor)
        try:
            self._loop.add_writer(self._descriptor, self._write)
        except PermissionError:
            # epoll refuses files and the null device, which take any number of bytes without blocking.
            while self._left:
                self._write()

    @property
    def is_done(self) -> bool:
        """Whether everything is written, or can no longer be written."""
        return not self._left

    def close(self) -> None:
        """Close the descriptor and drop the rest."""
        if self._descriptor >= 0:
            self._loop.remove_writer(self._descriptor)
            os.close(self._descriptor)
        self._descriptor, self._left = -1, memoryview(b"")

    def _write(self) -> None:
        try:
            # A pipe that is writable takes this much without blocking, even if the descriptor blocks.
            self._left = self._left[os.write(self._descriptor, self._left[: select.PIPE_BUF]) :]
        except BlockingIOError:
            return
        except OSError:
            # The reader has gone or the disk is full: the output is optional.
            self.close()
        if not self._left:
            self.close()


def _reopened(descriptor: int) -> int:
    """Open a separate, non-blocking descriptor if possible, because the flag would affect all who share the pipe or
    terminal, such as the shell. A file is duplicated instead, to share its position."""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        try:
            return os.open(f"/proc/self/fd/{descriptor}", flags)
        except OSError:
            pass  # The pipe is another user's, or has no reader.
    return os.dup(descriptor)
