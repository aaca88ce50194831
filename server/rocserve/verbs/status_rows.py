"""Orders, filters and counts the rows of `rocserve status`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rocserve.verbs.status_poll import StatusRow

ATTENTION = "attention"
"""The order that `rocserve status` begins with: models with problems first, then busy ones."""
_NAME_ORDER = "model"
_RANKS = {"UNAVAILABLE": 0, "LOADING": 2, "CHECKING": 2, "UNLOADING": 2, "READY": 3}
_FAILING_RANK = 1
_IDLE_RANK = 4
"""Of models that were never loaded, such as samples without weights."""


def in_order(rows: Sequence[StatusRow], order: str) -> list[StatusRow]:
    """`rows`: by name and version. `order`: ATTENTION, "model", or a column, whose largest figures come first."""
    if order == _NAME_ORDER:
        return list(rows)
    if order == ATTENTION:
        return sorted(rows, key=lambda row: (_rank(row), -row.rate))
    return sorted(rows, key=lambda row: -row.number(order))


def _rank(row: StatusRow) -> int:
    if row.state == "READY" and row.failure_rate > 0:
        return _FAILING_RANK
    return _RANKS.get(row.state, _IDLE_RANK)


def matching(rows: Sequence[StatusRow], words: str) -> list[StatusRow]:
    """Return the rows that have all words, in small or capital letters, in their name, state, engine or reason."""
    wanted = words.lower().split()
    return [row for row in rows if all(word in row.text for word in wanted)]


def orders(figures: Sequence[str]) -> list[str]:
    """Return the orders that one key chooses among, one after the other."""
    return [ATTENTION, _NAME_ORDER, *(name for name in figures if name != "engine")]


@dataclass(frozen=True, slots=True)
class Counts:
    ready: int
    loading: int
    failed: int
    not_loaded: int
    rate: float
    """Requests per second of all models."""

    @classmethod
    def of(cls, rows: Sequence[StatusRow]) -> Counts:
        ranks = Counter(_RANKS.get(row.state, _IDLE_RANK) for row in rows)
        return cls(ranks[3], ranks[2], ranks[0], ranks[4], sum(row.rate for row in rows))

    def __str__(self) -> str:
        loading = f", {self.loading} loading" if self.loading else ""
        others = f", {self.not_loaded} not loaded" if self.not_loaded else ""
        return f"{self.ready} ready{loading}, {self.failed} failed{others}, {self.rate:.1f} requests/s"
