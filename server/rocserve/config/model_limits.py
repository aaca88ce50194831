"""Model limits: reads the parameters that override the server's limits of time, memory and worker processes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from rocserve.core.errors import invalid_argument
from rocserve.settings import TimeLimits

SHARED_WORKER = "shared_worker"
"""Parameter: worker process that a model shares with others; "" = a separate process; missing = the server decides."""


def time_limits(parameters: Mapping[str, str], defaults: TimeLimits) -> TimeLimits:
    """Return a model's time limits. Raises ServeError (INVALID_ARGUMENT) if a parameter is not a number of seconds."""
    names = ("request_timeout", "hang_timeout", "load_timeout")
    given = {name: text for name in names if (text := parameters.get(f"{name}_secs")) is not None}
    return replace(defaults, **{f"{name}_seconds": _seconds(f"{name}_secs", text) for name, text in given.items()})


def worker_bounds(parameters: Mapping[str, str]) -> Mapping[str, int]:
    """Return field of WorkerSettings -> bound. Raises ServeError (INVALID_ARGUMENT) if a parameter is not a number."""
    bounds = {}
    for field in ("memory_bytes", "tasks", "file_bytes"):
        name = f"worker_{field}"
        if (text := parameters.get(name)) is not None:
            # More than 18 digits may exceed the kernel's 63 bits.
            if not (text.isascii() and text.isdecimal() and len(text) <= 18):
                raise invalid_argument(f"parameter '{name}': expected a whole number, 0 for no bound, got '{text}'")
            bounds[field] = int(text)
    return bounds


def idle_unload_seconds(parameters: Mapping[str, str]) -> float:
    """Return the seconds without requests after which a model is unloaded; infinity = never. Raises ServeError
    (INVALID_ARGUMENT) if the parameter is not a number of seconds."""
    return _seconds("idle_unload_secs", parameters.get("idle_unload_secs", "0")) or math.inf


def is_pinned(parameters: Mapping[str, str]) -> bool:
    """Whether a model is never unloaded for room. Raises ServeError (INVALID_ARGUMENT) if not "true" or "false"."""
    text = parameters.get("pinned", "false")
    if text not in ("true", "false"):
        raise invalid_argument(f"parameter 'pinned': expected true or false, got '{text}'")
    return text == "true"


def _seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise invalid_argument(f"parameter '{name}': expected a number of seconds, 0 for no limit, got '{text}'")
    return seconds
