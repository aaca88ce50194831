"""The file of traces, read while it is written."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

_TRIES = 100


def read_entries(path: Path) -> list[dict[str, Any]]:
    """What the array holds; read again where a trace was just being written. Nothing where there is no file yet."""
    for _ in range(_TRIES):
        try:
            return json.loads(path.read_text()) if path.exists() and path.stat().st_size else []
        except json.JSONDecodeError:
            time.sleep(0.02)
    raise AssertionError(f"{path} is no JSON")
