"""Waiting for what has no event. It ends as soon as the condition holds; nothing here is a promise of how soon."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE_SECONDS = 90.0
"""Longer than anything takes on a machine that has other things to do."""
_PAUSE_SECONDS = 0.01


def wait_until(condition: Callable[[], object], what: str = "the condition", seconds: float = PATIENCE_SECONDS) -> None:
    """Look until the condition holds; an AssertionError with `what` when it does not in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not come to be within {seconds} s"
        time.sleep(_PAUSE_SECONDS)


async def until(
    condition: Callable[[], object], what: str = "the condition", seconds: float = PATIENCE_SECONDS
) -> None:
    """As `wait_until`, while the asyncio loop goes on."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not come to be within {seconds} s"
        await asyncio.sleep(_PAUSE_SECONDS)
