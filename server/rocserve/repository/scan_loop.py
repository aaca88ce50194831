"""Scans the repositories whenever something in them changed, or may have.

Where notifications tell of changes, only the folders that they name are scanned, and those that are young or have not
settled; the same after each poll interval, and all of them as often as that costs little, for what nothing tells of.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable

from rocserve.repository.layout import RepositoryScan, ScanRunner
from rocserve.repository.watch import UNWATCHED_POLL_SECONDS, RepositoryWatch

_SPACING_SECONDS = 0.05
_SHARE_OF_TIME = 4.0
"""A scan is followed by a pause this many times as long, however much is being written."""
_POLLS_SHARE = 0.01
"""Of a CPU's time: with thousands of folders scans of all of them are further apart than they were asked to be."""
_PAUSE_AFTER_ERROR_SECONDS = 1.0

OnScan = Callable[[RepositoryScan, float, float], float | None]
"""Given a scan, when it began and ended, returns when the next is due at the latest (times of the loop)."""


class ScanLoop:
    def __init__(
        self,
        scan_runner: ScanRunner,
        watch: RepositoryWatch,
        poll_seconds: float,
        on_scan: OnScan,
        unsettled: Callable[[], Iterable[str]],
        log: logging.Logger,
    ) -> None:
        """`unsettled`: the keys of the folders that are to be scanned each time."""
        self._scan_runner = scan_runner
        self._watch = watch
        self._poll_seconds = poll_seconds
        self._on_scan = on_scan
        self._unsettled = unsettled
        self._log = log
        self._duration = 0.0
        self._scan_all_at = 0.0

    async def scan(self) -> float:
        """One scan; returns when the next is due at the latest."""
        clock = asyncio.get_running_loop().time
        changed = self._watch.take()
        began = clock()
        if began >= self._scan_all_at:
            changed = None
        if changed is not None:
            models = self._scan_runner.latest.models
            folders = [models[key].folder for key in self._unsettled() if key in models]
            changed.update(folders, (folder.parent for folder in folders))
        scan = await self._scan_runner.run(changed)
        ended = clock()
        self._duration = ended - began
        poll_at = ended + max(self._poll_seconds, self._scan_runner.cpu_seconds / _POLLS_SHARE)
        if scan.unreadable:
            self._scan_all_at = ended + min(self._poll_seconds, UNWATCHED_POLL_SECONDS)
        elif changed is None:
            self._scan_all_at = poll_at
        due = self._on_scan(scan, began, ended)
        return min(poll_at, self._scan_all_at, math.inf if due is None else due)

    async def run(self) -> None:
        """Scan until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            try:
                await self._watch.renew()
                due = await self.scan()
                woken = await self._watch.wait(max(0.0, due - clock()))
            except Exception:
                self._log.exception("scanning the model repositories failed")
                self._scan_all_at = 0.0
                await asyncio.sleep(_PAUSE_AFTER_ERROR_SECONDS)
                continue
            if woken:
                # Notifications come in bursts.
                await asyncio.sleep(max(_SPACING_SECONDS, _SHARE_OF_TIME * self._duration))
