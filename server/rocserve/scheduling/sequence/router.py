"""Leads requests to the version that has their sequence: one that was replaced has its own until they end."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from rocserve.core.sequences import SequenceId

if TYPE_CHECKING:
    from rocserve.scheduling.sequence.scheduler import SequenceScheduler


class SequenceRouter:
    """The versions of one model with sequences."""

    def __init__(self) -> None:
        self._open: list[SequenceScheduler] = []
        self._closing: list[SequenceScheduler] = []

    def opened(self, version: SequenceScheduler) -> None:
        self._open.append(version)

    def closing(self, version: SequenceScheduler) -> bool:
        """A version takes no new sequences any more; whether another one does, through which requests of its sequences
        still come."""
        if version in self._open:
            self._open.remove(version)
        if self._open:
            self._closing.append(version)
        return bool(self._open)

    def closed(self, version: SequenceScheduler) -> None:
        """All its sequences have ended."""
        if version in self._closing:
            self._closing.remove(version)

    @property
    def has_sequences(self) -> bool:
        return any(version.has_sequences for version in (*self._open, *self._closing))

    def find(self, sequence: SequenceId, version: str, but: SequenceScheduler) -> SequenceScheduler | None:
        """Another version that has a sequence: one that has been replaced, or is about to be. `version`: as the request
        names it, "" where it does not; only that one will do. `but`: the version that asks."""
        others = (other for other in (*self._closing, *self._open) if other is not but)
        fitting = (other for other in others if not version or int(version) == other.version)
        return next((other for other in fitting if other.knows(sequence)), None)


class SequenceRouters:
    """Those of all models, for as long as anybody has them. For the thread that loads models."""

    def __init__(self) -> None:
        self._routers: weakref.WeakValueDictionary[str, SequenceRouter] = weakref.WeakValueDictionary()

    @property
    def have_sequences(self) -> bool:
        """Whether a sequence goes on, of any model."""
        return any(router.has_sequences for router in list(self._routers.values()))

    def of(self, model: str) -> SequenceRouter:
        """That of the versions of a model. `model`: names it in all repositories."""
        router = self._routers.get(model)
        if router is None:
            router = self._routers[model] = SequenceRouter()
        return router
