"""Decides when a change of files counts: when two scans, the settle time apart, have seen the same.

Times are seconds of any steady clock. Fingerprints are equal or not, never newer: a copy may carry old times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

_Name = TypeVar("_Name", bound=str)


class Debounce(Generic[_Name]):
    """Follows the fingerprints of named things; None = the thing is absent."""

    def __init__(self, settle_seconds: float) -> None:
        self._settle_seconds = settle_seconds
        self._settled: dict[_Name, Hashable] = {}
        self._candidates: dict[_Name, tuple[Hashable | None, float]] = {}
        """Fingerprints, and when the scan that first saw each had ended."""
        self._is_first = True

    @property
    def unsettled(self) -> frozenset[_Name]:
        """What differs from what was last settled, and may still be changing."""
        return frozenset(self._candidates)

    def observe(
        self,
        began: float,
        ended: float,
        fingerprints: Mapping[_Name, Hashable],
        is_old: Callable[[_Name], bool] = lambda _: False,
    ) -> frozenset[_Name]:
        """Take in a scan that lasted from `began` to `ended`; returns the names whose change now counts. `is_old`: what
        has not changed for so long that it counts at the first scan."""
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
        """Count this as settled without waiting."""
        self._candidates.pop(name, None)
        self._settled.pop(name, None)
        if fingerprint is not None:
            self._settled[name] = fingerprint

    def reopen(self, name: _Name) -> None:
        """Let its next settled state count as a change, even if it is what it was."""
        self._settled[name] = object()

    def due(self) -> float | None:
        """The earliest time at which a scan could settle something; None while nothing is unsettled."""
        if not self._candidates:
            return None
        return min(since for _, since in self._candidates.values()) + self._settle_seconds
