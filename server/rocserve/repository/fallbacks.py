"""Counts how often an engine has taken the place of one that could not load the model."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fallback:
    model: str
    version: int
    engine: str
    """What was to run it."""
    replaced_by: str
    """What runs it instead."""


class FallbackCounter:
    """From any thread. Only grows while the server runs, as counters of a metrics endpoint do."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[Fallback] = Counter()

    def count(self, fallback: Fallback) -> None:
        with self._lock:
            self._counts[fallback] += 1

    def snapshot(self) -> Mapping[Fallback, int]:
        with self._lock:
            return dict(self._counts)
