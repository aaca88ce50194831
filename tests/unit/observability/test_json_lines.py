"""The log as lines of JSON: whole objects, whatever is logged, from any thread, however the process ends."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from rocserve.observability.json_lines import LONGEST_LINE, unfinished
from rocserve.observability.log_fields import about
from rocserve.observability.logs import ROOT, ServerLog, WholeLines
from rocserve.settings import LogSettings


class WrittenLog:
    def __init__(self, file: Path) -> None:
        self.file = file
        self.server_log = ServerLog(LogSettings(file=file, format="json"), {})
        self.log = self.server_log.logger

    @property
    def lines(self) -> list[dict[str, Any]]:
        text = self.file.read_bytes()
        assert text.endswith(b"\n")
        assert all(len(line) < LONGEST_LINE for line in text.split(b"\n"))
        return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def written(tmp_path: Path) -> Iterator[WrittenLog]:
    logger = logging.getLogger(ROOT)
    before = (logger.level, logger.propagate, logger.handlers)
    log = WrittenLog(tmp_path / "log")
    yield log
    log.server_log.close()
    logger.setLevel(before[0])
    logger.propagate, logger.handlers = before[1:]


def test_a_line_has_its_time_level_logger_place_and_text(written: WrittenLog) -> None:
    written.log.getChild("repository").warning("model '%s' says \"no\"\nand\tgoes", "m")
    (line,) = written.lines
    moment = datetime.fromisoformat(line.pop("time"))
    assert moment.utcoffset() == timedelta(0)
    assert line.pop("place").startswith("test_json_lines.py:")
    assert line == {
        "level": "WARNING",
        "logger": "rocserve.repository",
        "process": os.getpid(),
        "text": "model 'm' says \"no\"\nand\tgoes",
    }


def test_fields_are_members_and_what_is_not_known_is_left_out(written: WrittenLog) -> None:
    fields = about(model="m", version=3, request_id="", client="10.0.0.1", code="OK", duration_ms=1.23456, responses=0)
    written.log.info("done", extra=fields)
    (line,) = written.lines
    known = {name: line[name] for name in line if name not in ("time", "place", "logger", "process", "level", "text")}
    assert known == {
        "model": "m",
        "version": "3",
        "client": "10.0.0.1",
        "code": "OK",
        "duration_ms": 1.235,
        "responses": 0,
    }


def test_a_traceback_is_a_member(written: WrittenLog) -> None:
    try:
        raise ValueError("no")
    except ValueError:
        written.log.exception("it failed")
    (line,) = written.lines
    assert line["text"] == "it failed"
    assert line["traceback"].startswith("Traceback (most recent call last):\n")
    assert line["traceback"].endswith("\nValueError: no")


@pytest.mark.parametrize("letter", ["x", '"', "\x1b", "é", "世", "😀", "\ud800", "\n"], ids=ascii)
def test_a_long_text_takes_several_lines_that_together_have_all_of_it(written: WrittenLog, letter: str) -> None:
    # pytest 9 has added handlers. It would send the lines from process to process, and a surrogate cannot be sent.
    del written.log.handlers[1:]
    text, name = f"begin {letter * 5000} end", letter * 3000
    try:
        raise ValueError(text)
    except ValueError:
        written.log.exception(
            "%s", text, extra=about(model=name, version=name, request_id=name, client=name, code=name)
        )
    lines = written.lines
    assert [line["part"] for line in lines] == [f"{number}/{len(lines)}" for number in range(1, len(lines) + 1)]
    assert "".join(line.get("text", "") for line in lines) == text
    assert "".join(line.get("traceback", "") for line in lines).endswith(f"ValueError: {text}")
    cut = lines[0]["model"]
    assert cut.endswith("...") and name.startswith(cut[:-3]) and len(cut) > 40


def test_the_form_stays_but_levels_change(written: WrittenLog) -> None:
    written.server_log.change(info=False, verbose=1)
    written.log.info("no")
    written.log.debug("yes")
    assert [(line["level"], line["text"]) for line in written.lines] == [("DEBUG", "yes")]


_WRITER = """
import logging, sys, threading
from rocserve.observability.logs import ServerLog
from rocserve.settings import LogSettings
log = ServerLog(LogSettings(format="json"), {}).logger
def write(number):
    count = 0
    while True:
        log.info("%d %d %s", number, count, "x" * (count * 331 % 9000))
        count += 1
for number in range(4):
    threading.Thread(target=write, args=(number,)).start()
"""


def test_a_killed_process_has_written_whole_lines_into_its_pipe() -> None:
    """It waits for its reader most of the time, so it is killed while it writes."""
    chance = random.Random(3)
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-c", _WRITER], stderr=subprocess.PIPE) as writer:
            assert writer.stderr is not None
            text = writer.stderr.read(chance.randrange(100_000, 300_000))
            writer.send_signal(signal.SIGKILL)
            text += writer.stderr.read()
        lines = text.split(b"\n")
        assert lines.pop() == b""
        assert len(lines) > 20
        parsed = [json.loads(line) for line in lines]
        assert {line["text"].split()[0] for line in parsed if line.get("part", "1/").startswith("1/")} <= set("0123")


def test_processes_that_share_a_pipe_do_not_mix_their_lines() -> None:
    read, write = os.pipe()
    writers = [subprocess.Popen([sys.executable, "-c", _WRITER], stderr=write) for _ in range(2)]
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read(400_000)
        for one in writers:
            one.kill()
        text += pipe.read()
    for one in writers:
        one.wait()
    assert {json.loads(line)["process"] for line in text.splitlines()} <= {one.pid for one in writers}
    assert text.endswith(b"\n")


@pytest.mark.parametrize(
    ("end", "count"),
    [
        (b'{"time":"a"}\n', 0),
        (b'{"time":"a"}\n{"time":"b","lev', 16),
        (b'{"time":"a"}\n{"ti', 4),
        (b'{"time":"b","lev', 16),
        (b"what another program has left", 0),
        (b'{"time":"a"}\nand then', 0),
        (b"", 0),
    ],
)
def test_what_a_killed_server_has_left_of_a_line(tmp_path: Path, end: bytes, count: int) -> None:
    assert unfinished(end) == count
    file = tmp_path / "log"
    file.write_bytes(b"0123456789\n" * 1000 + end)
    log = ServerLog(LogSettings(file=file, format="json"), {})
    log.close()
    assert file.read_bytes() == b"0123456789\n" * 1000 + end[: len(end) - count]


def test_a_file_in_another_form_is_left_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_bytes(b'{"time":"b","lev')
    ServerLog(LogSettings(file=file), {}).close()
    assert file.read_bytes() == b'{"time":"b","lev'


def test_a_line_that_only_half_fits_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "log"
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    taken: list[int] = []
    stream = WholeLines(descriptor, taken.append)
    stream.write("whole\n")
    write = os.write

    def half(to: int, data: bytes) -> int:
        if len(data) <= 4:
            raise OSError(28, "No space left on device")
        return write(to, data[: len(data) - 4])

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(OSError, match="No space left"):
        stream.write("much too long\n")
    monkeypatch.undo()
    assert taken == [10]
    stream.close()


def test_a_pipe_that_does_not_block_is_waited_for() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    script = "import os, sys, time; time.sleep(0.2); sys.stdout.write(str(len(os.fdopen(0, 'rb').read())))"
    with subprocess.Popen([sys.executable, "-c", script], stdin=read, stdout=subprocess.PIPE) as reader:
        os.close(read)
        stream = WholeLines(write)
        for _ in range(100):
            stream.write("x" * 3999 + "\n")
        stream.close()
        assert reader.stdout is not None
        assert reader.stdout.read() == b"400000"
