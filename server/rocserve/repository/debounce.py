"""Debounces file changes: a change counts when two scans, the settle time apart, see the same files. Times are seconds
of any steady clock. Fingerprints are only compared for equality, because a copy may carry old times."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

_Name = TypeVar("_Name", bound=str)


class Debounce(Generic[_Name]):
    """Tracks the fingerprints of names; None = absent."""

    def __init__(self, settle_seconds: float) -> None:
        self._settle_seconds = settle_seconds
        self._settled: dict[_Name, Hashable] = {}
        self._candidates: dict[_Name, tuple[Hashable | None, float]] = {}
        """Each unsettled fingerprint, and the end of the scan that first saw it."""
        self._is_first = True

    @property
    def unsettled(self) -> frozenset[_Name]:
        """The names that differ from their last settled state."""
        return frozenset(self._candidates)

    def observe(
        self,
        began: float,
        ended: float,
        fingerprints: Mapping[_Name, Hashable],
        is_old: Callable[[_Name], bool] = lambda _: False,
    ) -> frozenset[_Name]:
        """Record a scan that lasted from `began` to `ended`. Returns the names whose change counts now. `is_old`:
        whether a name has been unchanged for so long that it counts in the first scan."""
        changed = set()
        is_first, self._is_first = self._is_first, False
        for name in self._settled.keys() | self._candidates.keys() | fingerprints.keys():
            fingerprint = fingerprints.get(name)
            candidate, since = self._candidates.get(name, (None, math.inf))
            if self._settled.get(name) == fingerprint:
                self._candidates.pop(name, None)
            elif is_first and fingerprint is not None and is_old(name):
                changed.add(name)
                self.accept(name, fingerprint)
            elif since == math.inf or candidate != fingerprint:
                self._candidates[name] = fingerprint, ended
            elif began - since >= self._settle_seconds:
                changed.add(name)
                self.accept(name, fingerprint)
        return frozenset(changed)

    def accept(self, name: _Name, fingerprint: Hashable | None) -> None:
        """Make this fingerprint the settled one immediately."""
        self._candidates.pop(name, None)
        self._settled.pop(name, None)
        if fingerprint is not None:
            self._settled[name] = fingerprint

    def reopen(self, name: _Name) -> None:
        """Report the next settled state as a change, even if it equals the previous one."""
        self._settled[name] = object()

    def due(self) -> float | None:
        """Return the earliest time at which a scan could settle a name; None while all are settled."""
        if not self._candidates:
            return None
        return min(since for _, since in self._candidates.values()) + self._settle_seconds
