"""The log's lines: one a message, whatever the message is made of."""

from __future__ import annotations

from pathlib import Path

from rocserve.observability.logs import set_up_logging
from rocserve.settings import LogSettings


def test_what_files_and_engines_say_stays_in_its_line(tmp_path: Path) -> None:
    file = tmp_path / "log"
    log = set_up_logging(LogSettings(file=file))
    try:
        log.getChild("repository").info("tensor '%s' is damaged", "x\nE1121 00:00:00.000000 1 core] \x1b[2Jall is lost")
        log.info("Grüße, 世界")
    finally:
        log.handlers[0].close()
        log.handlers = []
    first, second = file.read_text().splitlines()
    assert first.endswith(r"repository] tensor 'x\nE1121 00:00:00.000000 1 core] \x1b[2Jall is lost' is damaged")
    assert second.endswith("Grüße, 世界")


def test_a_traceback_keeps_its_lines(tmp_path: Path) -> None:
    file = tmp_path / "log"
    log = set_up_logging(LogSettings(file=file))
    try:
        try:
            raise ValueError("no")
        except ValueError:
            log.exception("it failed")
    finally:
        log.handlers[0].close()
        log.handlers = []
    lines = file.read_text().splitlines()
    assert lines[0].endswith("it failed")
    assert lines[-1] == "ValueError: no"
    assert len(lines) > 3
