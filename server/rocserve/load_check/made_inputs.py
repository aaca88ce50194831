"""Makes inputs from only their names, types and shapes. Equal seeds give equal inputs in every process."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rocserve.core.datatypes import DataType
from rocserve.core.tensors import bfloat16_values
from rocserve.load_check.facts import GraphFacts
from rocserve.load_check.tensors import Array, CheckedInput, Feed, largest_integer

_LEVEL_STEP, _LEAST_STEP = 0.1, 0.1
"""How far values lie from the numbers that trees compare them with: relative, and from 0."""
_QUIET, _QUIET_INTEGERS = 1e-3, 8
"""Factor of a quiet row's floats, and what its integers are divided by."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How inputs are made. `input_search` searches for a recipe that a model accepts."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    """Open dimension -> its size."""
    floats: str = "normal"
    """ "normal", "unit" (0 to 1), "whole" (small whole numbers), "spread" (normal, times 0.01 to 100), or "levels"
    (close to the numbers that trees compare them with; integers and texts are mostly those that the model looks up)."""
    sentences: bool = False
    """Texts are several words, not one word or category."""
    mask: int = 1
    """Value of masks that means "do not hide" to the model."""
    full_lengths: bool = True
    """Inputs of lengths are the largest size, not free numbers."""
    ends: Mapping[str, int] = field(default_factory=dict)
    """Integer input -> exclusive end of its values; absent = only zeros are known to run."""
    from_samples: bool = False
    """Values come from warm-up samples; rows that are not samples draw them at random."""


class InputMaker:
    """Makes rows by their names: the same name, recipe and seed give the same row."""

    def __init__(
        self,
        inputs: Sequence[CheckedInput],
        facts: GraphFacts,
        seed: int,
        samples: Sequence[Feed] = (),
        are_requests: bool = False,
    ) -> None:
        """`are_requests`: rows are never joined, so an input without rows need not be the same for all of them."""
        self.inputs = inputs
        self._seed = seed
        self._are_requests = are_requests
        self.levels = facts.levels
        self._thresholds = facts.thresholds
        self.texts = facts.texts
        self._words = facts.words or ("cat", "the dog sat", "Rome", "1", "stocks fell on monday", "2.5", "Oslo", "red")
        self.ends = {given.name: end for given in inputs if (end := given.end or facts.ends.get(given.name))}
        """Input -> exclusive end of its values, if the model defines it."""
        rows = [row for sample in samples for row in _rows_of(sample, inputs)]
        self.sample_rows = [row for row in rows if _shapes(row) == _shapes(rows[0])]
        """Rows of the samples that can share a batch with the first one."""

    def row(self, recipe: Recipe, name: str, has_largest: bool = False) -> dict[str, Array]:
        """Make the inputs of one row. An input without rows is the same for all names, if rows are joined.
        `has_largest`: integers are all their largest value, because a model may look up those of one place only."""
        row = {}
        for given in self.inputs:
            rng = self._random(name if given.has_rows or self._are_requests else "", given.name)
            values = self._sampled(given, name, rng) if recipe.from_samples else None
            if values is None:
                values = self._made(given, recipe, rng)
                if has_largest and given.kind in "iu" and values.size and given.name in recipe.ends:
                    values.fill(recipe.ends[given.name] - 1)
            row[given.name] = values
        return row

    def hidden(self, recipe: Recipe, row: Feed) -> dict[str, Array] | None:
        """Return the row with the second half of each mask hidden and lengths of 1; None without masks and lengths."""
        changed: dict[str, Array] = {}
        for given in self.inputs:
            values = row[given.name]
            if given.is_mask and given.has_rows and values.ndim > 1 and values.shape[-1] > 1:
                changed[given.name] = values.copy()
                changed[given.name][..., values.shape[-1] // 2 :] = 1 - recipe.mask
            elif given.is_length and given.has_rows and given.kind in "iu":
                changed[given.name] = np.ones_like(values)
        return {**row, **changed} if changed else None

    def filled(self, recipe: Recipe, row: Feed, value: float) -> dict[str, Array]:
        """Return the row with this value in all floats, and in the integers that may have it."""
        filled = {
            given.name: np.full_like(row[given.name], value)
            for given in self._free_integers()
            if given.least <= value < recipe.ends.get(given.name, 0)
        }
        return {**changed_floats(row, lambda values: np.full_like(values, value)), **filled}

    def beyond_thresholds(self, recipe: Recipe, row: Feed) -> Mapping[str, dict[str, Array]]:
        """Return rows beyond the numbers that the model compares something with, by kind."""
        result = {}
        for threshold in self._thresholds:
            step = max(1.0, abs(threshold))
            result[f"above {threshold:g}"] = self.filled(recipe, row, threshold + step)
            result[f"below {threshold:g}"] = self.filled(recipe, row, threshold - step)
            if threshold.is_integer() and not has_floats(row):
                result[f"equal to {threshold:g}"] = self.filled(recipe, row, threshold)
        return result

    def quiet(self, row: Feed) -> dict[str, Array]:
        """Return the row with small numbers, and nothing true."""
        result = changed_floats(row, lambda values: values * _QUIET)
        result |= {given.name: row[given.name] // _QUIET_INTEGERS for given in self._free_integers()}
        return result | {name: np.zeros_like(values) for name, values in row.items() if self._is_flag(name)}

    def highest(self, recipe: Recipe, row: Feed) -> dict[str, Array]:
        """Return the row with the largest integers, and everything true."""
        flags = {name: np.ones_like(values) for name, values in row.items() if self._is_flag(name)}
        return {**row, **(self.largest_ids(recipe, row) or {}), **flags}

    def _free_integers(self) -> Sequence[CheckedInput]:
        """Return the integer inputs whose values any row may have."""
        return [one for one in self.inputs if one.kind in "iu" and one.has_rows and not (one.is_mask or one.is_length)]

    def _is_flag(self, name: str) -> bool:
        return any(one.name == name and one.kind == "b" and one.has_rows and not one.is_mask for one in self.inputs)

    def zeros(self, row: Feed) -> dict[str, Array]:
        """Return a row of zeros; masks and texts stay."""
        kept = {given.name for given in self.inputs if given.is_mask or given.kind == "O" or not given.has_rows}
        return {name: values if name in kept else np.zeros_like(values) for name, values in row.items()}

    def largest_ids(self, recipe: Recipe, row: Feed) -> dict[str, Array] | None:
        """Return the row with the largest value in integers that index a table; None without such integers."""
        ids = {
            given.name: np.full_like(row[given.name], recipe.ends[given.name] - 1)
            for given in self.inputs
            if given.kind in "iu" and given.has_rows and recipe.ends.get(given.name, 0) > 1
        }
        return {**row, **ids} if ids else None

    def first_ids(self, recipe: Recipe, row: Feed) -> dict[str, Array] | None:
        """Return the row with 0, 1, 2, ... in integers that index a table: special ids are the first ones of most."""
        ids = {}
        for given in self._free_integers():
            values, count = row[given.name], recipe.ends.get(given.name, 0) - given.least
            if count > 1:
                ids[given.name] = np.resize(np.arange(values.size) % count + given.least, values.shape)
                ids[given.name] = ids[given.name].astype(values.dtype)
        return {**row, **ids} if ids else None

    def near(self, row: Feed, other: Feed) -> dict[str, Array]:
        """Return a similar row: its floats differ by 3 %, and the last of its integers and texts."""
        result = {name: np.array(values) for name, values in changed_floats(row, lambda x: x * 1.03).items()}
        for name, values in result.items():
            if values.dtype.kind in "iuO" and values.size > 1:
                values.flat[-1] = other[name].flat[-1]
        return result

    def minus_one(self, row: Feed) -> dict[str, Array]:
        """Return the row with -1 in the integers that may have any value: in many models it means "nothing"."""
        free = [one.name for one in self._free_integers() if one.kind == "i" and one.name not in self.ends]
        return {**row, **{name: np.full_like(row[name], -1) for name in free}}

    def known_texts(self, row: Feed) -> Mapping[str, dict[str, Array]]:
        """Return rows of the texts that the model compares something with, and of the empty text, by kind."""
        names = [one.name for one in self.inputs if one.kind == "O" and one.has_rows]
        return {
            f"text {text!r}": {**row, **{name: np.full_like(row[name], text) for name in names}}
            for text in (("", *self.texts) if names else ())
        }

    def _random(self, name: str, tensor: str) -> np.random.Generator:
        return np.random.default_rng([self._seed, zlib.crc32(name.encode()), zlib.crc32(tensor.encode())])

    def _sampled(self, given: CheckedInput, name: str, rng: np.random.Generator) -> Array | None:
        """Return the values of a sample, for further rows any of them; None = no sample has this input."""
        rows = [row[given.name] for row in self.sample_rows if given.name in row]
        if not rows:
            return None
        index = row_number(name) if given.has_rows or self._are_requests else 0
        values = rows[index % len(rows)]
        # Values alone do not identify a mask or a length.
        if index < len(rows) or given.is_mask or given.is_length or values.size < 2:
            return np.array(values)
        return np.asarray(rng.choice(values.reshape(-1), values.shape), values.dtype)

    def _made(self, given: CheckedInput, recipe: Recipe, rng: np.random.Generator) -> Array:
        shape, kind = given.shape_with(recipe.sizes), given.kind
        values: Any
        if given.is_mask:
            values = np.full(shape, recipe.mask)
        elif kind == "O":
            known = recipe.floats == "levels" and self.texts
            words = np.array((*self.texts, self._words[0]) if known else self._words, object)
            values = rng.choice(words, shape)
            for _ in range(3 if recipe.sentences else 0):
                values = values + " " + rng.choice(words, shape)
        elif kind == "b":
            values = rng.random(shape) < 0.7
        elif kind in "iu" and given.is_length and recipe.full_lengths and recipe.sizes:
            values = np.full(shape, max(recipe.sizes.values()))
        elif kind in "iu" or given.name in recipe.ends:
            end = recipe.ends.get(given.name, given.least + 1)
            # 0 means "nothing" in most tables, so only the row of zeros has it.
            least = given.least + 1 if end > given.least + 3 else given.least
            values = rng.integers(least, max(end, least + 1), shape)
            if recipe.floats == "levels" and given.name in self.levels:
                close = np.floor(rng.choice(np.array(self.levels[given.name]), shape)) + (rng.random(shape) < 0.25)
                close = np.clip(close, given.least, self.ends.get(given.name, largest_integer(given.datatype) + 1) - 1)
                values = np.where(rng.random(shape) < 0.8, close, values)
        elif recipe.floats == "levels" and given.name in self.levels:
            levels = rng.choice(np.array(self.levels[given.name]), shape)
            values = levels + (np.abs(levels) + _LEAST_STEP) * _LEVEL_STEP * rng.standard_normal(shape)
        elif recipe.floats == "whole":
            # Ids and categories that a model takes as floats are often few.
            values = rng.integers(0, 5, shape)
        else:
            values = rng.random(shape) if recipe.floats == "unit" else rng.standard_normal(shape)
            values = values * 10 ** rng.uniform(-2, 2, shape) if recipe.floats == "spread" else values
        dtype = np.float32 if given.datatype is DataType.BF16 else given.datatype.numpy_dtype
        return np.asarray(values).astype(dtype)


_ROW_NAMES = "abcdefghijklmnopqrstuvwxyz"


def row_name(number: int) -> str:
    """Return the name of a row by its number; samples, if there are some, are the first rows."""
    return _ROW_NAMES[number] if number < len(_ROW_NAMES) else str(number - len(_ROW_NAMES))


def row_number(name: str) -> int:
    """Return a number for a row's name: "a" is 0."""
    return _ROW_NAMES.index(name) if name in _ROW_NAMES else len(_ROW_NAMES) + int(name)


def changed_floats(row: Feed, change: Callable[[Array], Any]) -> dict[str, Array]:
    """Return the row with other floats; a value beyond the type's range becomes its largest value."""
    result = {}
    for name, values in row.items():
        if values.dtype.kind == "f":
            limits = np.finfo(values.dtype)
            with np.errstate(over="ignore", invalid="ignore"):
                values = np.asarray(np.clip(change(values), limits.min, limits.max), values.dtype)
        result[name] = values
    return result


def has_floats(row: Feed) -> bool:
    return any(values.dtype.kind == "f" for values in row.values())


def nudged(row: Feed) -> dict[str, Array]:
    """Return the row with its floats moved by a few units of their last place, up and down: a network that normalises
    would not see them move together. Whole numbers move away from 0, so that they stay the same as integers."""

    def move(values: Array) -> Array:
        directions = np.where(values == np.round(values), 1, np.resize((1, -1, -1, 1, 1, -1, 1), values.shape))
        return np.asarray(values * (1 + directions * 4 * np.finfo(values.dtype).eps).astype(values.dtype))

    return changed_floats(row, move)


def seed_of(digest: str) -> int:
    """Return the seed of a model with this digest, in hexadecimal digits."""
    return int(digest[:8], 16)


def bits_of(inputs: Sequence[CheckedInput]) -> Callable[[Feed], Feed]:
    """Return a function that turns the float32 values of BF16 inputs into the bits that an engine takes."""
    names = {given.name for given in inputs if given.datatype is DataType.BF16}

    def encode(feed: Feed) -> Feed:
        if not names:
            return feed
        return {
            name: (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
            if name in names
            else values
            for name, values in feed.items()
        }

    return encode


def _rows_of(sample: Feed, inputs: Sequence[CheckedInput]) -> Sequence[Feed]:
    """Return the rows of a warm-up sample, with BF16 as float32; none if it lacks an input."""
    if any(given.name not in sample for given in inputs):
        return ()
    values = {given.name: _values(sample[given.name], given) for given in inputs}
    counts = {len(values[given.name]) for given in inputs if given.has_rows and values[given.name].ndim}
    rows = min(counts, default=1)
    return [
        {given.name: values[given.name][i : i + 1] if given.has_rows else values[given.name] for given in inputs}
        for i in range(rows)
    ]


def _shapes(row: Feed) -> Sequence[tuple[int, ...]]:
    return [values.shape[1:] for values in row.values()]


def _values(array: Array, given: CheckedInput) -> Array:
    if given.datatype is DataType.BF16 and array.dtype == np.uint16:
        return bfloat16_values(array)
    return np.asarray(array)
