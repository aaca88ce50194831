"""The log's lines: one for each message, whatever the message contains, in tritonserver's two forms."""

from __future__ import annotations

import io
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rocserve.observability.logs import ROOT, ServerLog
from rocserve.settings import LogSettings


class WrittenLog:
    """A log in a file, and its lines."""

    def __init__(self, file: Path, escapes: bool = True, **settings: object) -> None:
        self._file = file
        environment = {} if escapes else {"TRITON_SERVER_ESCAPE_LOG_MESSAGES": "0"}
        self.server_log = ServerLog(LogSettings(file=file, **settings), environment)  # type: ignore[arg-type]
        self.log = self.server_log.logger

    @property
    def lines(self) -> list[str]:
        return self._file.read_text().splitlines()


@pytest.fixture(autouse=True)
def _logger_as_it_was() -> Iterator[None]:
    logger = logging.getLogger(ROOT)
    before = (logger.level, logger.propagate, logger.handlers)
    yield
    logger.setLevel(before[0])
    logger.propagate, logger.handlers = before[1:]


@pytest.fixture
def written(tmp_path: Path) -> Iterator[WrittenLog]:
    log = WrittenLog(tmp_path / "log")
    yield log
    log.server_log.close()


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[WrittenLog]:
    log = WrittenLog(tmp_path / "log", escapes=False)
    yield log
    log.server_log.close()


def test_a_line_in_the_default_form(written: WrittenLog) -> None:
    written.log.getChild("repository").warning("model 'm' says \"no\"\nand\tgoes")
    (line,) = written.lines
    head = rf"W\d{{4}} \d\d:\d\d:\d\d\.\d{{6}} {os.getpid()} test_logs\.py:\d+\] "
    assert re.fullmatch(head + re.escape(r'''"model 'm' says \"no\"\nand\tgoes"'''), line)


def test_a_line_in_the_iso_form(tmp_path: Path) -> None:
    log = WrittenLog(tmp_path / "log", format="ISO8601")
    log.log.error("no")
    log.server_log.close()
    (line,) = log.lines
    assert re.fullmatch(rf'\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\dZ E {os.getpid()} test_logs\.py:\d+\] "no"', line)


@pytest.mark.parametrize(
    ("escapes", "shown"),
    [
        (True, '"' + r"tensor 'x\nE1121 00:00:00.000000 1 core] \u001b[2Jall is lost \x9b \ud800' is damaged" + '"'),
        (False, r"tensor 'x\nE1121 00:00:00.000000 1 core] \x1b[2Jall is lost \x9b \ud800' is damaged"),
    ],
)
def test_what_files_and_engines_say_stays_in_its_line(tmp_path: Path, escapes: bool, shown: str) -> None:
    written = WrittenLog(tmp_path / "log", escapes)
    written.log.info("tensor '%s' is damaged", "x\nE1121 00:00:00.000000 1 core] \x1b[2Jall is lost \x9b \ud800")
    written.log.info("Grüße, 世界")
    written.server_log.close()
    first, second = written.lines
    assert first.endswith(f"] {shown}")
    assert second.rstrip('"').endswith("Grüße, 世界")


def test_a_traceback_is_part_of_its_line(written: WrittenLog) -> None:
    try:
        raise ValueError("no")
    except ValueError:
        written.log.exception("it failed")
    (line,) = written.lines
    assert '"it failed\\nTraceback (most recent call last):\\n' in line
    assert line.endswith('\\nValueError: no"')


def test_a_traceback_keeps_its_lines_where_nothing_is_escaped(plain: WrittenLog) -> None:
    try:
        raise ValueError("no")
    except ValueError:
        plain.log.exception("it failed")
    assert plain.lines[0].endswith("it failed")
    assert plain.lines[-1] == "ValueError: no"
    assert len(plain.lines) > 3


def test_levels_are_switched_while_it_is_written(written: WrittenLog) -> None:
    def log_all() -> str:
        before = len(written.lines)
        written.log.debug("detail")
        written.log.getChild("part").info("information")
        written.log.warning("warning")
        written.log.error("error")
        return "".join(line[0] for line in written.lines[before:])

    changes = 0

    def count() -> None:
        nonlocal changes
        changes += 1

    written.server_log.on_change.append(count)
    assert log_all() == "IWE"
    written.server_log.change(info=False)
    assert log_all() == "WE"
    written.server_log.change(warning=False, error=False, verbose=1)
    # Tritonserver logs details as information, but has a separate switch for them.
    assert log_all() == "I"
    written.server_log.change(info=True, warning=True, error=True, format="ISO8601")
    assert log_all() == "2222"
    assert changes == 3
    assert written.server_log.settings.format == "ISO8601"


def test_lines_that_cannot_be_written_go_to_standard_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    written = WrittenLog(folder / "log")
    written.log.info("before")
    shutil.rmtree(folder)
    written.log.info("while it is away")
    written.log.info("and on")
    folder.mkdir()
    written.log.info("after")
    written.server_log.close()
    assert [line.split("] ")[1] for line in capfd.readouterr().err.splitlines()] == ['"while it is away"', '"and on"']
    (line,) = written.lines
    assert line.endswith('] "after"')


def test_a_full_disk_is_no_error_of_the_part_that_logs(capfd: pytest.CaptureFixture[str]) -> None:
    written = WrittenLog(Path("/dev/full"))
    written.log.info("told elsewhere")
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith('] "told elsewhere"')


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "environment", "has_colours"),
    [
        (Terminal, {}, True),
        (Terminal, {"NO_COLOR": ""}, True),
        (Terminal, {"NO_COLOR": "1"}, False),
        (io.TextIOWrapper, {}, False),
    ],
)
def test_a_terminal_gets_colours_for_what_needs_attention(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stream: type[io.TextIOWrapper],
    environment: dict[str, str],
    has_colours: bool,
) -> None:
    shown = tmp_path / "shown"
    with stream(shown.open("wb")) as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        log = ServerLog(LogSettings(), environment).logger
        log.info("as usual")
        log.warning("act")
        log.error("broken")
        monkeypatch.undo()
    usual, act, broken = shown.read_text().splitlines()
    assert re.fullmatch(r'I\d{4} .*"as usual"', usual)
    assert [line[:5] for line in (act, broken)] == (["\x1b[33m", "\x1b[31m"] if has_colours else [act[:5], broken[:5]])
    assert [line.endswith('"\x1b[0m') for line in (act, broken)] == [has_colours] * 2
    assert ("\x1b" in shown.read_text()) == has_colours


def test_a_file_gets_no_colours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    written = WrittenLog(tmp_path / "log")
    written.log.error("broken")
    assert "\x1b" not in written.lines[0]
    written.server_log.close()
