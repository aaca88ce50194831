"""Copies a worker's standard output and error to the server's log, line by line. A model may write anything: binary
data, lines without end, millions of lines. So lines are cut, unprintable characters escaped, and the rate bounded; a
worker that writes faster than the server reads waits in its write."""

from __future__ import annotations

import asyncio
import logging
import os

from rocserve.core.printable import printable_line
from rocserve.observability.failures import Allowance

_LONGEST_LINE = 4096
"""Bytes; the rest of a line is dropped."""
_READ_BYTES = 64 * 1024
_PAUSE_SECONDS = 0.005
"""Pause after a full read, or while lines are left out: at most 13 MB/s are read, which takes little of the loop."""
_LINES_A_SECOND = 100
_BURST_LINES = 500
_CHARACTERS_A_SECOND = 32 * 1024
_BURST_CHARACTERS = 256 * 1024
_REPORT_SECONDS = 1.0
"""Time between two reports of how many lines were left out."""

_CRASH = b"Fatal Python error: "

_LEVELS = {name: getattr(logging, name) for name in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")}
"""By the words that `main.py` writes."""


class WorkerOutput:
    def __init__(self, descriptor: int, prefix: str, log: logging.Logger) -> None:
        """Take over the pipe's reading end. `prefix`: printed before each line."""
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._prefix = prefix
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._begun = b""
        self._cutting = False
        self._lines = Allowance(_BURST_LINES, _LINES_A_SECOND)
        self._characters = Allowance(_BURST_CHARACTERS, _CHARACTERS_A_SECOND)
        self._dropped = 0
        self._report: asyncio.TimerHandle | None = None
        self._last = b""
        self._crashed = False
        self._watch()

    @property
    def last_line(self) -> str:
        """The last line that was not empty, without Python's report of a crash: often the reason of the worker's
        end."""
        return _split_level(printable_line(self._last, _LONGEST_LINE))[1]

    def close(self) -> None:
        """Read the rest, and stop."""
        if self._descriptor < 0:
            return
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._descriptor)
        for _ in range(32):
            if not self._read():
                break
        if self._begun:
            self._take_line(self._begun)
        self._report_dropped()
        os.close(self._descriptor)
        self._descriptor = -1

    def _on_readable(self) -> None:
        size = self._read()
        # When all writing ends are closed, `close` is called as soon as the worker's end is known.
        if not size or size >= _READ_BYTES or self._dropped:
            self._loop.remove_reader(self._descriptor)
        if size and (size >= _READ_BYTES or self._dropped):
            self._pause = self._loop.call_later(_PAUSE_SECONDS, self._watch)

    def _watch(self) -> None:
        self._loop.add_reader(self._descriptor, self._on_readable)

    def _read(self) -> int:
        """Returns the number of bytes."""
        try:
            data = os.read(self._descriptor, _READ_BYTES)
        except BlockingIOError:
            return 0
        *lines, rest = data.split(b"\n", self._lines.left)
        if lines:
            lines[0] = self._begun + lines[0]
            self._begun = b""
            for line in lines:
                if not self._cutting:
                    self._take_line(line)
                self._cutting = False
        if b"\n" in rest:
            # Of lines that came too fast, only the last one and the beginning of the next are kept.
            skipped, _, rest = rest.rpartition(b"\n")
            before, crash, _ = skipped.partition(b"\n" + _CRASH)
            if not self._crashed and (last := before.rpartition(b"\n")[2]).strip():
                self._last = last
            self._crashed = self._crashed or bool(crash)
            self._drop(skipped.count(b"\n") + 1)
            if not lines:
                # The skipped lines continue a line that began before.
                self._begun, self._cutting = b"", False
        if not self._cutting:
            self._begun += rest
            if len(self._begun) > _LONGEST_LINE:
                self._take_line(self._begun)
                self._begun, self._cutting = b"", True
        return len(data)

    def _take_line(self, line: bytes) -> None:
        if not line.strip():
            return
        self._crashed = self._crashed or line.startswith(_CRASH)
        if not self._crashed:
            self._last = line
        if not self._lines.take():
            self._drop(1)
            return
        level, text = _split_level(printable_line(line, _LONGEST_LINE))
        if not self._characters.take(len(text)):
            self._drop(1)
            return
        self._log.log(level, "%s%s", self._prefix, text)

    def _drop(self, lines: int) -> None:
        self._dropped += lines
        if self._report is None:
            self._report = self._loop.call_later(_REPORT_SECONDS, self._report_dropped)

    def _report_dropped(self) -> None:
        if self._report is not None:
            self._report.cancel()
            self._report = None
        if self._dropped:
            self._log.warning("%s%d lines left out, they came too fast", self._prefix, self._dropped)
            self._dropped = 0


def _split_level(text: str) -> tuple[int, str]:
    """Split off the level that a worker's own log puts before each line. Lines that a model prints have none."""
    word, _, rest = text.partition(" ")
    level = _LEVELS.get(word)
    return (logging.INFO, text) if level is None else (level, rest)
