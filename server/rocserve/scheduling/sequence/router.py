"""Finds the version that has a sequence: a version that was replaced keeps its sequences until they end."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from rocserve.core.sequences import SequenceId

if TYPE_CHECKING:
    from rocserve.scheduling.sequence.scheduler import SequenceScheduler


class SequenceRouter:
    """Keeps the schedulers of all versions of a model with sequences."""

    def __init__(self) -> None:
        self._open: list[SequenceScheduler] = []
        self._closing: list[SequenceScheduler] = []

    def add(self, version: SequenceScheduler) -> None:
        self._open.append(version)

    def begin_closing(self, version: SequenceScheduler) -> bool:
        """Give a version no new sequences. Returns whether another version takes them; it then passes on requests of
        old ones."""
        if version in self._open:
            self._open.remove(version)
        if self._open:
            self._closing.append(version)
        return bool(self._open)

    def remove(self, version: SequenceScheduler) -> None:
        if version in self._closing:
            self._closing.remove(version)

    def restart(self, sequence: SequenceId, version: SequenceScheduler) -> None:
        """End a sequence in the versions that are closing, because it starts again in this one."""
        for other in self._closing:
            if other is not version:
                other.end_sequence(sequence)

    @property
    def has_sequences(self) -> bool:
        return any(version.has_sequences for version in (*self._open, *self._closing))

    def find(self, sequence: SequenceId, version: str, exclude: SequenceScheduler) -> SequenceScheduler | None:
        """Return the version other than `exclude` that has a sequence. `version`: the only one allowed; "" = any."""
        others = (other for other in (*self._closing, *self._open) if other is not exclude)
        fitting = (other for other in others if not version or int(version) == other.version)
        return next((other for other in fitting if other.knows(sequence)), None)


class SequenceRouters:
    """Keeps the routers of all models while schedulers use them. For the thread that loads models."""

    def __init__(self) -> None:
        self._routers: weakref.WeakValueDictionary[str, SequenceRouter] = weakref.WeakValueDictionary()

    @property
    def have_sequences(self) -> bool:
        return any(router.has_sequences for router in list(self._routers.values()))

    def of(self, model: str) -> SequenceRouter:
        """Return the router of a model's versions. `model`: unique among all repositories."""
        router = self._routers.get(model)
        if router is None:
            router = self._routers[model] = SequenceRouter()
        return router
