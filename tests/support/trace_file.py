"""Reads the file of traces while the server writes it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

_TRIES = 100


def read_entries(path: Path) -> list[dict[str, Any]]:
    """The array's entries. Reads again if a trace was just being written. Empty if there is no file yet."""
    for _ in range(_TRIES):
        try:
            return json.loads(path.read_text()) if path.exists() and path.stat().st_size else []
        except json.JSONDecodeError:
            time.sleep(0.02)
    raise AssertionError(f"{path} is no JSON")
