"""The limits of time that a model's parameters set instead of the server's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from rocserve.core.errors import invalid_argument
from rocserve.settings import TimeLimits

_FIELDS = {
    "request_timeout_secs": "request_seconds",
    "hang_timeout_secs": "hang_seconds",
    "load_timeout_secs": "load_seconds",
}
"""Of TimeLimits, by parameter."""


def time_limits(parameters: Mapping[str, str], defaults: TimeLimits) -> TimeLimits:
    """Those of a model. Raises: ServeError: INVALID_ARGUMENT, a parameter is no time."""
    given = {field: _seconds(name, parameters[name]) for name, field in _FIELDS.items() if name in parameters}
    return replace(defaults, **given)


def _seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise invalid_argument(f"parameter '{name}': expected a number of seconds, 0 for no limit, got '{text}'")
    return seconds
