"""Reads the file of traces while the server writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.waiting import wait_until


def read_entries(path: Path) -> list[dict[str, Any]]:
    """The array's entries. Reads again while a trace is being written. Empty if there is no file yet."""
    read: list[dict[str, Any]] = []

    def is_whole() -> bool:
        try:
            read[:] = json.loads(path.read_text()) if path.exists() and path.stat().st_size else []
        except json.JSONDecodeError:
            return False
        return True

    wait_until(is_whole, f"an array in JSON in {path}")
    return read
