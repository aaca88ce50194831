"""Looks at the repositories whenever something in them changed, or may have."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from rocserve.repository.layout import RepositoryLook
from rocserve.repository.looks import Looks
from rocserve.repository.watch import RepositoryWatch

_SPACING_SECONDS = 0.05
_SHARE_OF_TIME = 4.0
"""A look is followed by a pause this many times as long, however much is being written."""
_PAUSE_AFTER_ERROR_SECONDS = 1.0

OnLook = Callable[[RepositoryLook, float, float], float | None]
"""Given a look, when it began and ended, returns when the next is due at the latest (times of the loop)."""


class LookLoop:
    def __init__(self, looks: Looks, watch: RepositoryWatch, on_look: OnLook, log: logging.Logger) -> None:
        self._looks = looks
        self._watch = watch
        self._on_look = on_look
        self._log = log
        self._duration = 0.0

    async def look(self) -> float | None:
        """One look; returns when the next is due, None = when something changes."""
        clock = asyncio.get_running_loop().time
        began = clock()
        look = await self._looks.take()
        ended = clock()
        self._duration = ended - began
        return self._on_look(look, began, ended)

    async def run(self) -> None:
        """Look until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            try:
                await self._watch.renew()
                due = await self.look()
                woken = await self._watch.wait(None if due is None else max(0.0, due - clock()))
            except Exception:
                self._log.exception("looking at the model repositories failed")
                await asyncio.sleep(_PAUSE_AFTER_ERROR_SECONDS)
                continue
            if woken:
                # Notifications come in bursts.
                await asyncio.sleep(max(_SPACING_SECONDS, _SHARE_OF_TIME * self._duration))
