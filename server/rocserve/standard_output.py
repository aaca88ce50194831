"""Writes what the server prints as fast as it is read, so that the server serves also where nobody reads it."""

from __future__ import annotations

import asyncio
import io
import os
import select
import stat
from typing import TextIO


class Printed(io.TextIOWrapper):
    """A text for `stream`, kept until it is written: it says of itself what the stream does, so that tables are drawn
    alike. What the stream's encoding has not is escaped."""

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
    """Has the loop write when the descriptor takes more. A thread that waited there could not be ended."""

    def __init__(self, descriptor: int, octets: bytes) -> None:
        """Raises: OSError."""
        self._left = memoryview(octets)
        self._loop = asyncio.get_running_loop()
        self._descriptor = _opened_anew(descriptor)
        try:
            self._loop.add_writer(self._descriptor, self._write)
        except PermissionError:
            # A file, or the null device: those take all at once, and epoll takes none of them.
            while self._left:
                self._write()

    @property
    def is_done(self) -> bool:
        """All is written, or can never be."""
        return not self._left

    def close(self) -> None:
        """What is not written by now is dropped."""
        if self._descriptor >= 0:
            self._loop.remove_writer(self._descriptor)
            os.close(self._descriptor)
        self._descriptor, self._left = -1, memoryview(b"")

    def _write(self) -> None:
        try:
            # So much a pipe that is ready takes without waiting, were it one that waits.
            self._left = self._left[os.write(self._descriptor, self._left[: select.PIPE_BUF]) :]
        except BlockingIOError:
            return
        except OSError:
            # The reader has gone, or the disk is full: nobody need read it.
            self.close()
        if not self._left:
            self.close()


def _opened_anew(descriptor: int) -> int:
    """One that does not wait, where there can be one: the flag would be that of all who share the pipe or terminal,
    the shell for one. A file is not opened anew, for its end may have moved."""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        try:
            return os.open(f"/proc/self/fd/{descriptor}", flags)
        except OSError:
            pass  # It is another user's, or nobody reads it any more.
    return os.dup(descriptor)
