"""Takes looks at the repositories in a thread, one at a time, and remembers the last."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from rocserve.repository.layout import RepositoryLook, RepositoryScanner
from rocserve.repository.scan import ModelLook


class Looks:
    def __init__(self, scanner: RepositoryScanner, log: logging.Logger) -> None:
        self.latest = RepositoryLook({}, {})
        self._scanner = scanner
        self._log = log
        self._lock = asyncio.Lock()
        self._unreadable: dict[Path, str] = {}
        self._ignored: set[tuple[Path, str]] = set()

    async def take(self) -> RepositoryLook:
        """Look at all repositories. A slow disk keeps its caller waiting, and nobody else."""
        async with self._lock:
            look = await asyncio.to_thread(self._scanner.look)
        self.latest = look
        self._report(look)
        return look

    async def is_unchanged(self, look: ModelLook, version: int) -> bool:
        """Whether all that a load of the version reads is still as it was looked at."""
        try:
            return look.same_for(version, await asyncio.to_thread(self._scanner.look_again, look))
        except OSError:
            return False

    def _report(self, look: RepositoryLook) -> None:
        for root, reason in look.unreadable.items():
            if self._unreadable.get(root) != reason:
                self._log.error("failed to read model repository '%s': %s; its models stay as they are", root, reason)
        for root in self._unreadable.keys() - look.unreadable.keys():
            self._log.info("model repository '%s' can be read again", root)
        self._unreadable = look.unreadable
        for model in look.models.values():
            for name in model.ignored:
                if (model.folder, name) not in self._ignored:
                    self._ignored.add((model.folder, name))
                    self._log.warning(
                        "ignoring version folder '%s' of model '%s': a version has no leading zeros", name, model.name
                    )
