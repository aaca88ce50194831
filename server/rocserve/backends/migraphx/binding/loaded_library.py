"""Which MIGraphX this process has loaded, by the files that are mapped into it."""

from __future__ import annotations

import re
from pathlib import Path

_MAPS = Path("/proc/self/maps")
_CORE = re.compile(r"/libmigraphx\.so\.(\d+)")
_MAJOR, _MINOR = 1_000_000, 1_000
"""libmigraphx.so.2014000 is of version 2.14.0."""


def loaded_core() -> tuple[str, str]:
    """The path of libmigraphx.so.* and its version, e.g. "2.14.0"; "" each where it cannot be told."""
    for line in _MAPS.read_text(errors="surrogateescape").splitlines():
        match = _CORE.search(line)
        if match:
            return line[line.index("/") :], _version(int(match[1]))
    return "", ""


def _version(number: int) -> str:
    """ "" for a file whose number says nothing."""
    if number < _MAJOR:
        return ""
    return f"{number // _MAJOR}.{number % _MAJOR // _MINOR}.{number % _MINOR}"
