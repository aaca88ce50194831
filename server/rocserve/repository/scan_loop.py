"""Scans the repositories whenever something in them changed, or may have."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from rocserve.repository.layout import RepositoryScan
from rocserve.repository.scan_runner import ScanRunner
from rocserve.repository.watch import RepositoryWatch

_SPACING_SECONDS = 0.05
_SHARE_OF_TIME = 4.0
"""A scan is followed by a pause this many times as long, however much is being written."""
_PAUSE_AFTER_ERROR_SECONDS = 1.0

OnScan = Callable[[RepositoryScan, float, float], float | None]
"""Given a scan, when it began and ended, returns when the next is due at the latest (times of the loop)."""


class ScanLoop:
    def __init__(self, scan_runner: ScanRunner, watch: RepositoryWatch, on_scan: OnScan, log: logging.Logger) -> None:
        self._scan_runner = scan_runner
        self._watch = watch
        self._on_scan = on_scan
        self._log = log
        self._duration = 0.0

    async def scan(self) -> float | None:
        """One scan; returns when the next is due, None = when something changes."""
        clock = asyncio.get_running_loop().time
        began = clock()
        scan = await self._scan_runner.run()
        ended = clock()
        self._duration = ended - began
        return self._on_scan(scan, began, ended)

    async def run(self) -> None:
        """Scan until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            try:
                await self._watch.renew()
                due = await self.scan()
                woken = await self._watch.wait(None if due is None else max(0.0, due - clock()))
            except Exception:
                self._log.exception("scanning the model repositories failed")
                await asyncio.sleep(_PAUSE_AFTER_ERROR_SECONDS)
                continue
            if woken:
                # Notifications come in bursts.
                await asyncio.sleep(max(_SPACING_SECONDS, _SHARE_OF_TIME * self._duration))
