"""Finds the sizes of 1 that a model has dropped: a network that squeezes all of them drops the batch of one row too."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from rocserve.core.validation import admits


def with_dropped_sizes(declared: Sequence[int], shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape of one row that fits the `declared` shape and is `shape` without some sizes of 1; None if
    nothing was dropped, or if several shapes fit."""
    # With more dimensions, the ways to drop some of them are too many to try.
    if not len(shape) < len(declared) <= 8:
        return None
    found = set()
    for places in combinations(range(len(declared)), len(shape)):
        sizes = dict(zip(places, shape, strict=True))
        whole = tuple(sizes.get(place, 1) for place in range(len(declared)))
        if whole[0] == 1 and admits(declared, whole):
            found.add(whole)
    return found.pop() if len(found) == 1 else None
