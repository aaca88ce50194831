"""Reads the limits of a model's time and of its processes that its parameters set instead of the server's flags."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from rocserve.core.errors import invalid_argument
from rocserve.settings import TimeLimits

_TIME_LIMITS = ("request_timeout", "hang_timeout", "load_timeout")
"""Parameters, which end in _secs, and fields of TimeLimits, which end in _seconds."""
_IDLE_UNLOAD = "idle_unload_secs"
_PINNED = "pinned"
SHARED_WORKER = "shared_worker"
"""The group of models whose process this one is to be in; "" = it is to have its own. Left out, it does not say."""
_WORKER_BOUNDS = ("memory_bytes", "tasks", "file_bytes")
"""Fields of WorkerSettings, and parameters, which begin with worker_."""
_MOST_DIGITS = 18
"""Of a number that the kernel takes: longer ones may not fit into its 63 bits."""


def time_limits(parameters: Mapping[str, str], defaults: TimeLimits) -> TimeLimits:
    """Those of a model. Raises: ServeError: INVALID_ARGUMENT, a parameter is no time."""
    given = {name: text for name in _TIME_LIMITS if (text := parameters.get(f"{name}_secs")) is not None}
    return replace(defaults, **{f"{name}_seconds": _seconds(f"{name}_secs", text) for name, text in given.items()})


def worker_bounds(parameters: Mapping[str, str]) -> Mapping[str, int]:
    """Those of a model, by the fields of WorkerSettings. Raises: ServeError: INVALID_ARGUMENT, one is no number."""
    bounds = {}
    for field in _WORKER_BOUNDS:
        name = f"worker_{field}"
        if (text := parameters.get(name)) is not None:
            if not (text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS):
                raise invalid_argument(f"parameter '{name}': expected a whole number, 0 for no bound, got '{text}'")
            bounds[field] = int(text)
    return bounds


def idle_unload_seconds(parameters: Mapping[str, str]) -> float:
    """After how long without a request a model is unloaded until the next; infinity = never. Raises: ServeError:
    INVALID_ARGUMENT, it is no time."""
    return _seconds(_IDLE_UNLOAD, parameters.get(_IDLE_UNLOAD, "0")) or math.inf


def is_pinned(parameters: Mapping[str, str]) -> bool:
    """Whether a model is never unloaded to make room. Raises: ServeError: INVALID_ARGUMENT, it is neither true nor
    false."""
    text = parameters.get(_PINNED, "false")
    if text not in ("true", "false"):
        raise invalid_argument(f"parameter '{_PINNED}': expected true or false, got '{text}'")
    return text == "true"


def _seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise invalid_argument(f"parameter '{name}': expected a number of seconds, 0 for no limit, got '{text}'")
    return seconds
