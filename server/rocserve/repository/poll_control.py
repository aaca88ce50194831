"""Poll mode: what is in the repositories is served, whenever it changes and has settled."""

from __future__ import annotations

import asyncio
import time

from rocserve.repository.debounce import Debounce
from rocserve.repository.folder_follower import FolderFollower
from rocserve.repository.layout import RepositoryScan
from rocserve.repository.scan import ModelScan

_OLD_SECONDS = 2.0
"""Files that have not changed for this long before the server started are not being copied."""
_SCANS_WHILE_UNSETTLED = 5
"""How often, within the settle time, to scan what has not settled."""


class PollControl:
    """Decides which folders have settled, and lets the follower read those."""

    def __init__(self, follower: FolderFollower, settle_seconds: float) -> None:
        self._follower = follower
        self._settle_seconds = settle_seconds
        self._debounce = Debounce(settle_seconds)
        self._is_first = True

    @property
    def unsettled(self) -> frozenset[str]:
        """Folders that differ from what was last read."""
        return self._debounce.unsettled

    def on_scan(self, scan: RepositoryScan, began: float, ended: float) -> float | None:
        """Take in a scan; returns when the next is due. See ScanLoop."""
        if self._is_first:
            self._is_first = False
            self._accept_old(scan)
        fingerprints = {name: model.fingerprint for name, model in scan.models.items()}
        for name in sorted(self._debounce.observe(began, ended, fingerprints)):
            self._follower.follow(name, scan.models.get(name))
        due = self._debounce.due()
        # Notifications may come late (watchdog holds back half of a rename), and what goes and comes back again and
        # again must not be taken for gone because two scans happened to miss it.
        return None if due is None else min(due, ended + self._settle_seconds / _SCANS_WHILE_UNSETTLED)

    def files_changed(self, scan: ModelScan) -> None:
        """What was loaded from this folder was thrown away: read it again when it has settled."""
        self._debounce.reopen([scan.key])

    async def wait(self) -> None:
        """Return when all that has settled is read."""
        await asyncio.sleep(0)
        await self._follower.wait()

    def _accept_old(self, scan: RepositoryScan) -> None:
        settled_ns = time.time_ns() - int(max(_OLD_SECONDS, self._settle_seconds) * 1e9)
        for name, model in scan.models.items():
            if 0 < model.changed_ns < settled_ns:
                self._debounce.accept(name, model.fingerprint)
                self._follower.follow(name, model)
