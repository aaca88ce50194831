"""Waiting for what has no event. It ends as soon as the condition holds; nothing here is a promise of how soon."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

PATIENCE_SECONDS = 90.0
"""Longer than anything takes on a machine that has other things to do."""
_PAUSES_SECONDS = (0.01, 0.1)
"""At first, and in the end. To look costs processor time, which what is waited for may want."""
_PAUSE_SHARE = 0.05
"""Of the time that has passed: what came to be is noticed so much later at the most."""


def wait_until(condition: Callable[[], object], what: str = "the condition", seconds: float = PATIENCE_SECONDS) -> None:
    """Look until the condition holds; an AssertionError with `what` when it does not in time."""
    for pause in _pauses(what, seconds):
        if condition():
            return
        time.sleep(pause)


async def until(
    condition: Callable[[], object], what: str = "the condition", seconds: float = PATIENCE_SECONDS
) -> None:
    """As `wait_until`, while the asyncio loop goes on."""
    for pause in _pauses(what, seconds):
        if condition():
            return
        await asyncio.sleep(pause)


def _pauses(what: str, seconds: float) -> Iterator[float]:
    """An AssertionError when the condition has been looked at after that time."""
    begun = time.monotonic()
    looked_late = False
    while not looked_late:
        waited = time.monotonic() - begun
        looked_late = waited >= seconds
        yield min(max(_PAUSES_SECONDS[0], waited * _PAUSE_SHARE), _PAUSES_SECONDS[1])
    raise AssertionError(f"{what} did not come to be within {seconds} s")
