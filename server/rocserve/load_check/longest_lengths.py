"""Finds the longest input that a model takes: one beyond the table of its positions ends in an error."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from rocserve.core.padding import Padding
from rocserve.load_check.batches import Batches
from rocserve.load_check.budget import Budget, OutOfTime, Trials
from rocserve.load_check.facts import GraphFacts
from rocserve.load_check.input_search import NoInputs, find_inputs
from rocserve.load_check.made_inputs import InputMaker, bits_of
from rocserve.load_check.short_inputs import Reading, ShortInputs, unknown_lengths
from rocserve.load_check.tensors import CheckedInput, Run

_MOST_ELEMENTS = 1 << 24
"""Of the padded dimensions alone; a run of more takes longer than a check may."""


def longest_lengths(
    run: Run,
    inputs: Sequence[CheckedInput],
    outputs: Sequence[str],
    facts: GraphFacts,
    padding: Padding,
    budget: Budget,
    seed: int,
    usual: int,
    fixed_rows: int | None = None,
) -> Sequence[int]:
    """Return for each dimension the longest length that the engine takes, but no more than `usual`, unless a table in
    the file ends further on, within the dimension's sizes. Where nothing shows the length it is `usual`: the check of
    the padding then says why it must not be."""
    longest = [min(usual, one.sizes[-1]) for one in padding.dimensions]
    if facts.couples_rows or unknown_lengths(inputs, padding):
        return longest
    encode = bits_of(inputs)
    trials = Trials(lambda feed: run(encode(feed)), budget)
    maker = InputMaker(inputs, facts, seed)
    batches = Batches(trials, inputs, outputs, facts.exposed, fixed_rows)
    try:
        found = find_inputs(trials, batches.single, maker)
        shorts = ShortInputs(maker, found.recipe, padding, Reading(padding.values))
        known = shorts.usual_lengths()

        def takes(index: int, length: int) -> bool:
            """Return whether one dimension may have this length, while the others have a known or the same one."""
            alone = [length if place == index else own for place, own in enumerate(known)]
            for lengths in dict.fromkeys((tuple(alone), (length,) * len(known))):
                row = shorts.row("a", lengths) if math.prod(lengths) <= _MOST_ELEMENTS else None
                if row is not None and batches.single(row) is not None:
                    return True
            return False

        for index, dimension in enumerate(padding.dimensions):
            tables = [size + 1 for size in facts.tables if longest[index] < size <= dimension.sizes[-1]]
            taken = known[index]
            for bound in (longest[index], *tables):
                if taken >= bound or takes(index, bound):
                    taken = max(taken, bound)
                    continue
                longest[index] = _last(taken, bound, partial(takes, index))
                break
    except (OutOfTime, MemoryError, NoInputs):
        pass
    return longest


def _last(taken: int, refused: int, takes: Callable[[int], bool]) -> int:
    """Return the longest length that is taken. The one before the first that is known to be refused is tried first: it
    is the size of a table."""
    middle = refused - 1
    while refused - taken > 1:
        taken, refused = (middle, refused) if takes(middle) else (taken, middle)
        middle = (taken + refused) // 2
    return taken
