"""Orders, filters and counts the rows of `rocserve status`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rocserve.verbs.status_poll import StatusRow

ATTENTION = "attention"
"""The order that `rocserve status` begins with: models with problems first, then busy ones."""


def in_order(rows: Sequence[StatusRow], order: str) -> list[StatusRow]:
    """`rows`: by name and version. `order`: ATTENTION, "model", or a column, whose largest figures come first."""
    if order == "model":
        return list(rows)
    if order == ATTENTION:
        return sorted(rows, key=lambda row: (_rank(row), -row.rate))
    return sorted(rows, key=lambda row: -row.number(order))


def _rank(row: StatusRow) -> int:
    ranks = {"UNAVAILABLE": 0, "LOADING": 2, "CHECKING": 2, "UNLOADING": 2, "READY": 1 if row.failure_rate > 0 else 3}
    # The last ones are models that were never loaded, such as samples without weights.
    return ranks.get(row.state, 4)


def matching(rows: Sequence[StatusRow], words: str) -> list[StatusRow]:
    """Return the rows that have all words, in small or capital letters, in their name, state, engine or reason."""
    wanted = words.lower().split()
    return [row for row in rows if all(word in row.text for word in wanted)]


def orders(figures: Sequence[str]) -> list[str]:
    """Return the orders that one key chooses among, one after the other."""
    return [ATTENTION, "model", *(name for name in figures if name != "engine")]


def counts(rows: Sequence[StatusRow]) -> str:
    """Return how many rows are in which state, and the requests per second of all."""
    states = Counter(row.state for row in rows)
    ready, failed = states.pop("READY", 0), states.pop("UNAVAILABLE", 0)
    busy = sum(states.pop(state, 0) for state in ("LOADING", "CHECKING", "UNLOADING"))
    loading = f", {busy} loading" if busy else ""
    others = f", {states.total()} not loaded" if states else ""
    return f"{ready} ready{loading}, {failed} failed{others}, {sum(row.rate for row in rows):.1f} requests/s"
