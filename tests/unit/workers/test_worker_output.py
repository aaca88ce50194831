"""A worker that writes without end: the server reads on, its log does not fill."""

from __future__ import annotations

import asyncio
import os
import re
import threading

import pytest
from support.workers import LOG

from rocserve.workers.worker_output import WorkerOutput


class Writing:
    """Writes all of some bytes into a pipe, from a thread."""

    def __init__(self, data: bytes) -> None:
        self.reader, self._writer = os.pipe()
        self._data = data
        self.thread = threading.Thread(target=self._write)
        self.thread.start()

    def _write(self) -> None:
        with open(self._writer, "wb", buffering=0) as file:  # noqa: PTH123
            view = memoryview(self._data)
            while view:
                view = view[file.write(view) :]


async def log_of(data: bytes, caplog: pytest.LogCaptureFixture) -> tuple[list[str], WorkerOutput]:
    """The log's lines of all that was written, by what was read of it."""
    writing = Writing(data)
    output = WorkerOutput(writing.reader, "m:1: ", LOG)
    with caplog.at_level("INFO", LOG.name):
        await asyncio.to_thread(writing.thread.join, 20)
        assert not writing.thread.is_alive()
        output.close()
    return [record.message for record in caplog.records], output


def left_out(lines: list[str]) -> int:
    return sum(int(found[1]) for line in lines if (found := re.search(r"(\d+) lines left out", line)))


async def test_every_line_of_a_flood_is_written_or_counted(caplog: pytest.LogCaptureFixture):
    data = b"".join(b"line %d\n" % number for number in range(200_000)) + b"the end\n"
    lines, output = await log_of(data, caplog)
    written = [line for line in lines if line.startswith("m:1: line ") or line == "m:1: the end"]
    assert lines[0] == "m:1: line 0"
    assert written == [f"m:1: line {number}" for number in range(500)] + written[500:]
    assert len(written) < 1500
    assert len(written) + left_out(lines) == 200_001
    # One that says how many, a second, and not one for each that passes.
    assert len(lines) - len(written) < 20
    assert output.last_line == "the end"


async def test_the_last_line_is_the_last_where_only_the_first_ones_are_written(caplog: pytest.LogCaptureFixture):
    """All in one piece, of which the burst takes the beginning."""
    _, output = await log_of(b"line\n" * 600 + b"the end\n", caplog)
    assert output.last_line == "the end"


async def test_long_lines_are_bounded_by_what_they_take(caplog: pytest.LogCaptureFixture):
    lines, _ = await log_of((b"x" * 4000 + b"\n") * 400, caplog)
    assert 50 <= sum(line.startswith("m:1: xxx") for line in lines) < 200
    assert sum(line.startswith("m:1: xxx") for line in lines) + left_out(lines) == 400


async def test_the_last_words_before_a_crash_are_found_in_a_flood(caplog: pytest.LogCaptureFixture):
    data = b"line\n" * 2000 + b"last words\nFatal Python error: Aborted\n" + b"a frame\n" * 20
    _, output = await log_of(data, caplog)
    assert output.last_line == "last words"
