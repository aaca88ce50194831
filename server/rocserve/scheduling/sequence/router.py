"""Finds the version that has a sequence: a version that was replaced keeps its sequences until they end."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from rocserve.core.exchange import Exchange
from rocserve.core.requests import InferRequest
from rocserve.core.sequences import SequenceId
from rocserve.scheduling.sequence.table import SequenceTable


@dataclass(frozen=True, slots=True, eq=False)
class RoutedVersion:
    """A version with its sequences, and the way for requests that arrived at another version."""

    number: int
    table: SequenceTable
    adopt: Callable[[InferRequest, Exchange], None]
    """Takes a request for a sequence of this version. Raises ServeError."""
    on_restart: Callable[[], None]
    """Called when one of its sequences has ended because it starts again in another version."""


class SequenceRouter:
    """Knows all versions of a model with sequences."""

    def __init__(self) -> None:
        self._open: list[RoutedVersion] = []
        self._closing: list[RoutedVersion] = []

    def add(self, version: RoutedVersion) -> None:
        self._open.append(version)

    def begin_closing(self, version: RoutedVersion) -> bool:
        """Stop giving a version new sequences. Returns whether another version takes them; it then forwards requests of
        old ones."""
        if version in self._open:
            self._open.remove(version)
        if self._open:
            self._closing.append(version)
        return bool(self._open)

    def remove(self, version: RoutedVersion) -> None:
        if version in self._closing:
            self._closing.remove(version)

    def restart(self, sequence: SequenceId, version: RoutedVersion) -> None:
        """End a sequence in the versions that are closing, because it starts again in this one."""
        for other in self._closing:
            if other is not version:
                other.table.end_sequence(sequence, time.monotonic())
                other.on_restart()

    @property
    def has_sequences(self) -> bool:
        return any(not version.table.is_empty for version in (*self._open, *self._closing))

    def find(self, sequence: SequenceId, version: str, exclude: RoutedVersion) -> RoutedVersion | None:
        """Return the version other than `exclude` that has a sequence. `version`: the only one allowed; "" = any."""
        others = (other for other in (*self._closing, *self._open) if other is not exclude)
        fitting = (other for other in others if not version or int(version) == other.number)
        return next((other for other in fitting if sequence in other.table), None)


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
