"""Keeps the last lines that the workers of each model have written, for operators who look at the page."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple


class WorkerLine(NamedTuple):
    time_ms: int
    """Since the epoch."""
    level: str
    text: str


class RecentLines:
    """Lives on the asyncio loop."""

    def __init__(self, most_characters: int = 8 << 20) -> None:
        """`most_characters`: of all models together; then the model that has been silent for longest loses its oldest
        lines."""
        self._most_characters = most_characters
        self._characters = 0
        self._lines: OrderedDict[str, deque[WorkerLine]] = OrderedDict()
        """By source: a model, or a process that models share; the one that has been silent for longest is first."""
        self._sources: dict[str, str] = {}
        """Model -> the process that it shares with others."""

    def share(self, model: str, source: str) -> None:
        """Note whose lines are a model's: its own, or those of a process that it shares with others."""
        if source == model:
            self._sources.pop(model, None)
        else:
            self._sources[model] = source

    def add(self, source: str, level: str, text: str) -> None:
        lines = self._lines.setdefault(source, deque())
        self._lines.move_to_end(source)
        lines.append(WorkerLine(time.time_ns() // 1_000_000, level, text))
        self._characters += len(text)
        if len(lines) > 200:
            self._drop(source)
        while self._characters > self._most_characters:
            self._drop(next(iter(self._lines)))

    def of(self, model: str) -> Sequence[WorkerLine]:
        """Return a model's lines, oldest first."""
        return tuple(self._lines.get(self._sources.get(model, model), ()))

    def _drop(self, source: str) -> None:
        lines = self._lines[source]
        self._characters -= len(lines.popleft().text)
        if not lines:
            del self._lines[source]
