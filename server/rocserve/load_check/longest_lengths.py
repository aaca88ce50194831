"""Finds the longest input that a model accepts: inputs longer than its table of positions cause an error."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from rocserve.core.padding import Padding
from rocserve.load_check.budget import OutOfTime
from rocserve.load_check.input_search import NoInputs
from rocserve.load_check.length_trials import LengthTrials
from rocserve.load_check.short_inputs import unknown_lengths


def longest_lengths(model: LengthTrials, padding: Padding, usual: int) -> Sequence[int]:
    """Return for each dimension the longest length that the model takes, but no more than `usual`, unless a table in
    the file ends further on, within the dimension's sizes. An unknown length is `usual`: the check of the
    padding then reports why it must not be padded."""
    longest = [min(usual, one.sizes[-1]) for one in padding.dimensions]
    if model.facts.couples_rows or unknown_lengths(model.inputs, padding):
        return longest
    try:
        known = model.usual(padding)
        for index, dimension in enumerate(padding.dimensions):
            takes = partial(_takes, model, padding, index)
            tables = [size + 1 for size in model.facts.tables if longest[index] < size <= dimension.sizes[-1]]
            taken = known[index]
            for bound in (longest[index], *tables):
                if taken >= bound or takes(bound):
                    taken = max(taken, bound)
                    continue
                longest[index] = _last(taken, bound, takes)
                break
    except (OutOfTime, MemoryError, NoInputs):
        pass
    return longest


def refuses_longer(model: LengthTrials, padding: Padding, longest: Sequence[int]) -> Sequence[bool]:
    """Return for each dimension whether the model is seen to refuse one element more than its longest length."""
    try:
        return [not _takes(model, padding, index, length + 1) for index, length in enumerate(longest)]
    except (OutOfTime, MemoryError, NoInputs):
        return [False for _ in longest]


def _takes(model: LengthTrials, padding: Padding, index: int, length: int) -> bool:
    """Return whether one dimension may have this length, while the others have a known or the same one."""
    known = model.usual(padding)
    alone = tuple(length if place == index else own for place, own in enumerate(known))
    # A run of more takes longer than a check may.
    return any(
        math.prod(lengths) <= 1 << 24 and model.takes(padding, lengths)
        for lengths in dict.fromkeys((alone, (length,) * len(known)))
    )


def _last(taken: int, refused: int, takes: Callable[[int], bool]) -> int:
    """Return the longest accepted length. The one before the first length known to be refused is tried first: it is the
    size of a table."""
    middle = refused - 1
    while refused - taken > 1:
        taken, refused = (middle, refused) if takes(middle) else (taken, middle)
        middle = (taken + refused) // 2
    return taken
