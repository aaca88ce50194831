"""Runs scans of the repositories in a thread, one at a time, and remembers the last."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from pathlib import Path

from rocserve.repository.layout import RepositoryScan, RepositoryScanner
from rocserve.repository.scan import ModelScan


class ScanRunner:
    def __init__(self, scanner: RepositoryScanner, log: logging.Logger) -> None:
        self.latest = RepositoryScan({}, {})
        self.cpu_seconds = 0.0
        """Of the last scan."""
        self._scanner = scanner
        self._log = log
        self._lock = asyncio.Lock()
        self._unreadable: dict[Path, str] = {}
        self._ignored: set[tuple[Path, str]] = set()

    async def run(self, changed: Collection[Path] | None = None) -> RepositoryScan:
        """Scan all repositories, or of what was seen before only the folders that have `changed`. A slow disk keeps its
        caller waiting, and nobody else."""
        async with self._lock:
            scan = await asyncio.to_thread(self._scan, changed)
        self.latest = scan
        self._report(scan)
        return scan

    def _scan(self, changed: Collection[Path] | None) -> RepositoryScan:
        began = time.thread_time()
        scan = self._scanner.scan(changed)
        self.cpu_seconds = time.thread_time() - began
        return scan

    async def is_unchanged(self, scan: ModelScan, version: int) -> bool:
        """Whether all that a load of the version reads is still as it was scanned."""
        try:
            return scan.same_for(version, await asyncio.to_thread(self._scanner.rescan, scan))
        except OSError:
            return False

    def _report(self, scan: RepositoryScan) -> None:
        for root, reason in scan.unreadable.items():
            if self._unreadable.get(root) != reason:
                self._log.error("failed to read model repository '%s': %s; its models stay as they are", root, reason)
        for root in self._unreadable.keys() - scan.unreadable.keys():
            self._log.info("model repository '%s' can be read again", root)
        self._unreadable = scan.unreadable
        for model in scan.models.values():
            for name in model.ignored:
                if (model.folder, name) not in self._ignored:
                    self._ignored.add((model.folder, name))
                    self._log.warning(
                        "ignoring version folder '%s' of model '%s': a version has no leading zeros", name, model.name
                    )
