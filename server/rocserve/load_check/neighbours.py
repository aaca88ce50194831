"""Groups of batches that differ in some rows only. Different neighbours show different dependences: of 39 models whose
rows depend on each other, usual rows beside usual rows show 27."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rocserve.load_check.made_inputs import InputMaker, Recipe, changed_floats, has_floats
from rocserve.load_check.tensors import Array, Feed

_LARGE, _LARGEST, _LARGE_HALF = 1e3, 1e5, 30.0
"""Factors of large values: some engines refuse the largest, and squares overflow soon in half precision."""
_FAR, _FARTHEST = 16, 62
"""Neighbours between two rows, for models that look farther than the next row: dilated convolutions along the rows. The
batch has an even number of rows; those of one or three rows do not show dependences on an even number. The farthest
rows are the first and the last one of a batch that is as large as servers usually make it."""
_OUTLIER, _OUTLIER_STEP = 30.0, 64
"""One value in 64 is 30 times larger; more of them would not be outliers."""
SAME = "the same"
"""The kind of a neighbour that is the row itself: such a batch alone shows nothing of others."""
_USUAL, _QUIET, _NEAR, _ZEROS = "a usual row", "quiet", "near", "zeros"
MANY_ROWS = 25
"""Rows of a batch of a model that answers with classes or texts only, which seldom show a difference."""


@dataclass(frozen=True, slots=True)
class Group:
    """Batches of `rows`, with another row from place `at` on: one batch for each neighbour. A group may begin with the
    batch, of the very same rows, that the group before began with; it need not run again."""

    rows: Sequence[Feed]
    at: int
    neighbours: Mapping[str, Feed]
    """Kind of the neighbour -> the row. The other batches are compared with the first one that runs."""
    copies: int = 1
    """Of the neighbour, one after the other."""

    def batch(self, neighbour: Feed) -> list[Feed]:
        return [*self.rows[: self.at], *[neighbour] * self.copies, *self.rows[self.at :]]

    def kept(self, outputs: Feed) -> dict[str, Array]:
        """Return a batch's outputs without those of the neighbours."""
        places = slice(self.at, self.at + self.copies)
        return {name: np.delete(values, places, 0) for name, values in outputs.items()}


def groups(
    maker: InputMaker, recipe: Recipe, two: Sequence[Feed], says_little: bool, most_rows: float
) -> Iterator[Group]:
    """Yield the groups, the most effective first. `says_little`: no output is a float. `most_rows`: rows that a batch
    may have."""
    a, b = two
    c, d = (maker.row(recipe, name) for name in "cd")
    neighbours = _neighbours(maker, recipe, a, d)
    if most_rows == 2:
        yield from _pairs(maker, recipe, neighbours, (a, c, d), says_little)
    else:
        yield Group([a, b], 1, {_USUAL: c, **neighbours, SAME: a})
        yield Group([c, b], 0, {_USUAL: a, "another": d, SAME: c})
        if _differ(quiet := maker.quiet(b), b):
            loud = maker.highest(recipe, _large(d, _LARGE))
            yield Group([quiet, maker.zeros(a)], 1, {_QUIET: maker.quiet(c), "large, beside quiet ones": loud})
        if _differ(highest := maker.highest(recipe, a), a):
            low = {**maker.quiet(d), **_shared(maker, a)}
            beside = {"the largest": maker.highest(recipe, c), "small, beside the largest": low}
            yield Group([highest, maker.highest(recipe, b)], 1, beside)
    kept = [a, b] if most_rows > 2 else [a]
    hidden_rows = [hidden for row in (*kept, c) if (hidden := maker.hidden(recipe, row)) is not None]
    if hidden_rows:
        yield Group(hidden_rows[:-1], 1, {"half hidden": hidden_rows[-1], "not hidden, beside half hidden ones": c})
    # Values in a row that a model may replace by a value from all rows.
    outliers = {"an outlier": _OUTLIER, "a negative outlier": -_OUTLIER, "NaN": math.nan}
    for kind, factor in outliers.items() if has_floats(a) and most_rows > 2 else ():
        outlying = [_with_outliers(a, factor), *kept[1:]]
        yield Group(outlying, 1, {_USUAL: c, f"large, beside {kind}": _large(d, _LARGEST)})
    for copies in (_FAR, _FARTHEST):
        if most_rows >= copies + 2:
            yield Group([a, b], 1, {_USUAL: c, f"{copies} others": d}, copies=copies)
    if says_little and most_rows >= MANY_ROWS:
        many = [maker.row(recipe, str(number)) for number in range(MANY_ROWS - 1)]
        yield Group(many, 1, {_USUAL: c, "large, among many": _large(d, _LARGE)})


def _pairs(
    maker: InputMaker, recipe: Recipe, neighbours: Mapping[str, Feed], rows: Sequence[Feed], says_little: bool
) -> Iterator[Group]:
    """Yield groups of two rows, for models that are slow. They show nearly all that batches of three rows show, in a
    small part of the time. A quiet row replaces several neighbours: it differs from the usual row, but in the same
    direction; zeros are close to it, and the usual row is large beside it."""
    a, c, d = rows
    more: Mapping[str, Feed] = {_USUAL: c, "another": d} if says_little else {}
    quiet = {**maker.quiet(a), **_shared(maker, a)}
    if not _differ(quiet, a):
        yield Group([a], 0, {_USUAL: c, **neighbours, **more, SAME: a})
        yield Group([c], 1, {_USUAL: a, "another": d})
        return
    unlike = {kind: row for kind, row in neighbours.items() if kind != _ZEROS and (says_little or kind != _NEAR)}
    loud = maker.highest(recipe, _large(d, _LARGE))
    yield Group([a], 0, {_QUIET: quiet, **unlike, **more, SAME: a})
    yield Group([quiet], 1, {_USUAL: a, _ZEROS: maker.zeros(a), "large, beside a quiet one": loud})


def _differ(one: Feed, other: Feed) -> bool:
    return any(not np.array_equal(values, other[name]) for name, values in one.items())


def _shared(maker: InputMaker, row: Feed) -> Feed:
    """Return the inputs that all rows share, which do not belong to a neighbour."""
    return {given.name: row[given.name] for given in maker.inputs if not given.has_rows}


def _neighbours(maker: InputMaker, recipe: Recipe, a: Feed, d: Feed) -> Mapping[str, Feed]:
    """Return the neighbours of row a, by kind."""
    # Of one sign, so that a sum or an extreme of the batch exceeds any threshold in that direction.
    result: dict[str, Feed] = {"large": _large(d, _LARGEST), "large and negative": _large(d, -_LARGE)}
    result |= {_NEAR: maker.near(a, d), _ZEROS: maker.zeros(a)}
    if (ids := maker.largest_ids(recipe, d)) is not None:
        result["largest ids"] = ids
    if (ids := maker.first_ids(recipe, d)) is not None:
        result["first ids"] = ids
    if (hidden := maker.hidden(recipe, d)) is not None:
        result["half hidden"] = hidden
    result |= maker.beyond_thresholds(recipe, d)
    # These values are what a model may look for in all rows, and not what it computes with.
    result |= {"NaN and infinity": _without_numbers(d), "minus one": maker.minus_one(d), **maker.known_texts(d)}
    rows = {kind: {**row, **_shared(maker, d)} for kind, row in result.items()}
    return {kind: row for kind, row in rows.items() if _differ(row, d)}


def _with_outliers(row: Feed, factor: float) -> dict[str, Array]:
    def change(values: Array) -> Array:
        result = values.copy()
        result.flat[::_OUTLIER_STEP] = factor * (1 + np.abs(values.flat[::_OUTLIER_STEP]))
        return result

    return changed_floats(row, change)


def _without_numbers(row: Feed) -> dict[str, Array]:
    def change(values: Array) -> Array:
        result = np.full_like(values, math.nan)
        result.flat[1::2] = math.inf
        return result

    return {name: change(values) if values.dtype.kind == "f" else values for name, values in row.items()}


def _large(row: Feed, factor: float) -> dict[str, Array]:
    def change(values: Array) -> Array:
        of_type = factor if values.dtype != np.float16 else math.copysign(_LARGE_HALF, factor)
        return np.asarray(np.abs(values) * values.dtype.type(of_type))

    return changed_floats(row, change)
