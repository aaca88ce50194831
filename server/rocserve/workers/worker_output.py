"""Copies a worker's standard output and error to the server's log, line by line. A model may write anything: binary
data, lines without end, millions of lines. So lines are cut, unprintable characters escaped, and the rate bounded; a
worker that writes faster than the server reads waits in its write."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from rocserve.core.printable import printable_line
from rocserve.observability.failures import Allowance
from rocserve.observability.log_fields import about

_LONGEST_LINE = 4096
"""Bytes; the rest of a line is dropped."""
_READ_BYTES = 64 * 1024
_PAUSE_SECONDS = 0.005
"""Pause after a full read, or while lines are dropped: at most 13 MB/s are read, which takes little of the loop."""
_REPORT_SECONDS = 1.0
"""Time between two reports of how many lines were dropped."""

_CRASH = b"Fatal Python error: "

_LEVELS = {name: getattr(logging, name) for name in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")}
"""Levels by their names, with which `main.py` begins log lines."""


class WorkerOutput:
    """Reads one worker's output pipe. Lives on the asyncio loop."""

    def __init__(
        self,
        descriptor: int,
        prefix: str,
        log: logging.Logger,
        fields: Mapping[str, Any] = MappingProxyType({}),
        keep: Callable[[str, str], object] | None = None,
    ) -> None:
        """Take over the pipe's reading end. `prefix`: printed before each line. `fields`: arguments of `about`. `keep`:
        takes the level's name and the text of each line too."""
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._prefix = prefix
        self._fields = fields
        self._log = log
        self._keep = keep
        self._loop = asyncio.get_running_loop()
        self._pause_timer: asyncio.TimerHandle | None = None
        self._partial_line = b""
        self._drops_rest_of_line = False
        # Lines and characters: so many as a burst, and so many a second.
        self._line_allowance = Allowance(500, 100)
        self._character_allowance = Allowance(256 * 1024, 32 * 1024)
        self._dropped_lines = 0
        self._report_timer: asyncio.TimerHandle | None = None
        self._last_line = b""
        self._has_crashed = False
        self._watch()

    @property
    def last_line(self) -> str:
        """The last line that was not empty, except a crash report of Python: often why the worker ended."""
        return _split_level(printable_line(self._last_line, _LONGEST_LINE))[1]

    def close(self) -> None:
        """Read the rest, at most 2 MiB, and stop."""
        if self._descriptor < 0:
            return
        if self._pause_timer is not None:
            self._pause_timer.cancel()
        self._loop.remove_reader(self._descriptor)
        for _ in range(32):
            if not self._read():
                break
        if self._partial_line:
            self._take_line(self._partial_line)
        self._report_dropped()
        os.close(self._descriptor)
        self._descriptor = -1

    def _on_readable(self) -> None:
        size = self._read()
        # When all writing ends are closed, `close` is called as soon as the worker's end is known.
        if not size or size >= _READ_BYTES or self._dropped_lines:
            self._loop.remove_reader(self._descriptor)
        if size and (size >= _READ_BYTES or self._dropped_lines):
            self._pause_timer = self._loop.call_later(_PAUSE_SECONDS, self._watch)

    def _watch(self) -> None:
        self._loop.add_reader(self._descriptor, self._on_readable)

    def _read(self) -> int:
        """Returns the number of bytes."""
        try:
            data = os.read(self._descriptor, _READ_BYTES)
        except BlockingIOError:
            return 0
        *lines, rest = data.split(b"\n", self._line_allowance.left)
        if lines:
            lines[0] = self._partial_line + lines[0]
            self._partial_line = b""
            for line in lines:
                if not self._drops_rest_of_line:
                    self._take_line(line)
                self._drops_rest_of_line = False
        if b"\n" in rest:
            # Of the lines beyond the rate, only the last complete one and the beginning of the next are kept.
            skipped, _, rest = rest.rpartition(b"\n")
            before, crash, _ = skipped.partition(b"\n" + _CRASH)
            if not self._has_crashed and (last := before.rpartition(b"\n")[2]).strip():
                self._last_line = last
            self._has_crashed = self._has_crashed or bool(crash)
            self._drop(skipped.count(b"\n") + 1)
            if not lines:
                # The skipped lines continue a line that began before.
                self._partial_line, self._drops_rest_of_line = b"", False
        if not self._drops_rest_of_line:
            self._partial_line += rest
            if len(self._partial_line) > _LONGEST_LINE:
                self._take_line(self._partial_line)
                self._partial_line, self._drops_rest_of_line = b"", True
        return len(data)

    def _take_line(self, line: bytes) -> None:
        if not line.strip():
            return
        self._has_crashed = self._has_crashed or line.startswith(_CRASH)
        if not self._has_crashed:
            self._last_line = line
        if not self._line_allowance.take():
            self._drop(1)
            return
        level, text = _split_level(printable_line(line, _LONGEST_LINE))
        if not self._character_allowance.take(len(text)):
            self._drop(1)
            return
        fields = self._fields
        if level is not None and (found := _REQUEST.match(text)):
            fields = {**fields, "request_id": found[1]}
        level = logging.INFO if level is None else level
        self._log.log(level, "%s%s", self._prefix, text, extra=about(**fields))
        if self._keep is not None:
            self._keep(logging.getLevelName(level), text)

    def _drop(self, lines: int) -> None:
        self._dropped_lines += lines
        if self._report_timer is None:
            self._report_timer = self._loop.call_later(_REPORT_SECONDS, self._report_dropped)

    def _report_dropped(self) -> None:
        if self._report_timer is not None:
            self._report_timer.cancel()
            self._report_timer = None
        if self._dropped_lines:
            text = "%s%d lines dropped: the model writes too fast"
            self._log.warning(text, self._prefix, self._dropped_lines, extra=about(**self._fields))
            self._dropped_lines = 0


_REQUEST = re.compile(r"\[request id: (.*?)\] ")
"""The beginning of a line of a worker's log about requests, see core/request_prefix.py."""


def _split_level(text: str) -> tuple[int | None, str]:
    """Split off the level that a worker's own log puts before each line. Lines that a model prints have no level."""
    word, _, rest = text.partition(" ")
    level = _LEVELS.get(word)
    return (None, text) if level is None else (level, rest)
