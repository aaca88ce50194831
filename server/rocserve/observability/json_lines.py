"""Formats the log as lines of JSON, for `--log-format=json`."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from rocserve.observability.log_fields import fields_of

LONGEST_LINE = 4096
"""Bytes, with the end of the line. The kernel writes up to this many into a pipe at once or not at all (PIPE_BUF), even
if other processes write there or this process is killed. A longer message takes several lines."""


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object in a line. It is pure ASCII, so no text can break a line or a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        head: dict[str, Any] = {
            "time": f"{moment}.{int(record.created % 1 * 1e6):06d}Z",
            "level": record.levelname,
            "logger": record.name,
            "process": record.process,
            "place": f"{record.filename}:{record.lineno}",
            **{name: _bounded(value) for name, value in fields_of(record).items()},
        }
        texts = {"text": record.getMessage()}
        if record.exc_info:
            texts["traceback"] = self.formatException(record.exc_info)
        line = _written({**head, **texts})
        if len(line) < LONGEST_LINE:
            return line
        # Room for the number of the part, whose digits are not known yet.
        room = LONGEST_LINE - len(_written({**head, "part": "1000000/1000000", "traceback": ""})) - 1
        pieces = [(name, piece) for name, text in texts.items() for piece in _pieces(text, room)]
        return "\n".join(
            _written({**head, "part": f"{number}/{len(pieces)}", name: piece})
            for number, (name, piece) in enumerate(pieces, 1)
        )


def unfinished(end: bytes) -> int:
    """Return how many bytes at the end of a log are the beginning of a line that a killed server did not finish. `end`:
    the last LONGEST_LINE bytes of the log."""
    rest = end[end.rfind(b"\n") + 1 :]
    return len(rest) if rest.startswith(b'{"time":'[: len(rest)]) else 0


def _written(line: dict[str, Any]) -> str:
    return json.dumps(line, separators=(",", ":"))


def _bounded(value: Any) -> Any:
    # Five fields of this length leave room for a text.
    if not isinstance(value, str) or len(json.dumps(value)) <= 600:
        return value
    return _pieces(value, 600)[0] + "..."


def _pieces(text: str, room: int) -> list[str]:
    """Cut a text into pieces that take at most `room` bytes of JSON each."""
    pieces: list[str] = []
    begin = 0
    while begin < len(text):
        count = room
        while (size := len(json.dumps(text[begin : begin + count])) - 2) > room:
            count = min(count, len(text) - begin) * room // size
        pieces.append(text[begin : begin + count])
        begin += count
    return pieces
