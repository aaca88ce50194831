"""Waits for conditions that have no event. A wait ends as soon as the condition holds; nothing here promises how
soon."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

PATIENCE_SECONDS = 400.0
"""Longer than anything takes on a busy machine, twenty models that are checked and compiled at once among it."""
LOAD_CHECK_SECONDS = 90.0
"""What a server of the tests gives a load check, for a verdict on a busy machine, too. A model has several checks."""
_PAUSES_SECONDS = (0.01, 0.25)
"""The first and the longest pause between two checks: a check costs processor time that the awaited work may need."""
_PAUSE_SHARE = 0.05
"""A pause is this share of the time that has passed, so the end of a wait is noticed at most so much later."""


def wait_until(condition: Callable[[], object], what: str = "the condition", seconds: float = PATIENCE_SECONDS) -> None:
    """Check until the condition holds; raise an AssertionError with `what` after the time limit."""
    for pause in _pauses(what, seconds):
        if condition():
            return
        time.sleep(pause)


async def until(
    condition: Callable[[], object], what: str = "the condition", seconds: float = PATIENCE_SECONDS
) -> None:
    """As `wait_until`, while the asyncio loop runs."""
    for pause in _pauses(what, seconds):
        if condition():
            return
        await asyncio.sleep(pause)


def _pauses(what: str, seconds: float) -> Iterator[float]:
    """The pauses between checks; raises an AssertionError after the last check."""
    begun = time.monotonic()
    looked_late = False
    while not looked_late:
        waited = time.monotonic() - begun
        looked_late = waited >= seconds
        yield min(max(_PAUSES_SECONDS[0], waited * _PAUSE_SHARE), _PAUSES_SECONDS[1])
    raise AssertionError(f"{what} did not happen within {seconds} s")
