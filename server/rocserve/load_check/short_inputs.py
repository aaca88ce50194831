"""Makes inputs of chosen lengths, and pads them as the server does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rocserve.core.padding import Buckets, Lengths, Padding
from rocserve.load_check.made_inputs import InputMaker, Recipe, changed_floats, has_floats
from rocserve.load_check.tensors import Array, CheckedInput, Feed


@dataclass(frozen=True, slots=True)
class Reading:
    """An assumption about the inputs that distinguish real elements from added ones."""

    fills: Mapping[str, float]
    """Input -> the value of added elements; 0 if missing."""
    lengths: frozenset[str] = field(default_factory=frozenset)
    """Inputs that are the length."""
    is_usual: bool = True
    """Whether it follows from the configuration and from names alone; else the model must show that it hides so."""


def readings(
    inputs: Sequence[CheckedInput], recipe: Recipe, padding: Padding, written: frozenset[str]
) -> Iterator[Reading]:
    """Yield the readings to try, usual ones first. `written`: inputs whose padding value is configured."""
    carriers = Buckets(padding).inputs
    flags = [one.name for one in inputs if one.name in carriers and one.name not in written and _may_hide(one)]
    named = frozenset(one.name for one in inputs if one.is_length and one.kind in "iu" and recipe.full_lengths)
    unnamed = {
        one.name
        for one in inputs
        if one.kind in "iu" and one.name not in carriers and not one.is_mask and len(one.shape) <= 1 + one.has_rows
    }
    usual = Reading(padding.values, named)
    other = replace(usual, fills={**padding.values, **dict.fromkeys(flags, 1.0)}, is_usual=False)
    yield usual
    if flags:
        yield other
    if lengths := named | unnamed:
        for one in (usual, other) if lengths != named else ():
            if one is usual or flags:
                yield replace(one, lengths=lengths, is_usual=False)


def _may_hide(given: CheckedInput) -> bool:
    return given.is_mask or given.kind == "b"


class ShortInputs:
    """Makes rows, and pads them. A row has a length for each dimension of the padding."""

    def __init__(self, maker: InputMaker, recipe: Recipe, padding: Padding, reading: Reading) -> None:
        self._maker = maker
        self._recipe = recipe
        self._reading = reading
        self._buckets = Buckets(replace(padding, values=reading.fills))
        self._inputs = {given.name: given for given in maker.inputs}
        flags = {name for name in self._buckets.inputs if _may_hide(self._inputs[name])}
        self._hiding = flags | reading.lengths
        self._symbols = [
            [self._inputs[name].symbol(place) for name, places in one.inputs.items() for place in places]
            for one in padding.dimensions
        ]

    def usual_lengths(self) -> Sequence[int]:
        """Return the lengths at which the search has found inputs."""
        return [min(self._recipe.sizes.get(symbol, 1) for symbol in symbols) for symbols in self._symbols]

    def row(self, name: str, lengths: Lengths) -> dict[str, Array] | None:
        """Make a row of these lengths, in which everything is real; None = the samples are shorter."""
        sizes = {symbol: length for symbols, length in zip(self._symbols, lengths, strict=True) for symbol in symbols}
        row = self._maker.row(replace(self._recipe, sizes={**self._recipe.sizes, **sizes}), name)
        for tensor, places in self._buckets.inputs.items():
            for place, index in places:
                row[tensor] = row[tensor].take(range(min(lengths[index], row[tensor].shape[place])), place)
                if row[tensor].shape[place] < lengths[index]:
                    return None
        for given in self._inputs.values():
            if given.name in self._reading.lengths:
                row[given.name] = np.full_like(row[given.name], min(lengths))
            elif given.name in self._hiding:
                row[given.name] = np.full_like(row[given.name], self._shown(given.name))
        return row

    def kinds(self, lengths: Lengths) -> Iterator[tuple[str, Feed]]:
        """Yield rows of these lengths that show more than usual ones, with their names."""
        usual, other = self.row("a", lengths), self.row("b", lengths)
        if usual is None or other is None:
            return
        yield "usual", other
        changed: dict[str, Feed | None] = {"quiet": self._maker.quiet(usual)}
        if has_floats(usual):
            changed["negative"] = changed_floats(usual, lambda values: -np.abs(values))
            # Squares of larger values overflow in half precision.
            changed["large"] = changed_floats(usual, lambda values: np.abs(values) * values.dtype.type(30.0))
        beyond = self._maker.beyond_thresholds(self._recipe, usual)
        changed |= {kind: row for kind, row in beyond.items() if not self._is_hidden_by_value(row)}
        changed["largest ids"] = self._maker.largest_ids(self._recipe, usual)
        changed["first ids"] = self._maker.first_ids(self._recipe, usual)
        # Masks stay unchanged: with everything hidden, an answer may be anything.
        hiding = {name: usual[name] for name in self._hiding}
        yield from ((kind, {**row, **hiding}) for kind, row in changed.items() if row is not None)
        if min(lengths) > 1 and (hidden := self._hidden(usual, [length // 2 for length in lengths])) is not None:
            yield "half hidden", hidden

    def _is_hidden_by_value(self, row: Feed) -> bool:
        """Return whether an input is as if everything were added."""
        return any((row[name] == self._buckets.value(name)).all() for name in self._buckets.inputs)

    def negated(self, row: Feed) -> Feed:
        return {**changed_floats(row, lambda values: -values), **{name: row[name] for name in self._hiding}}

    def padded(self, row: Feed, sizes: Lengths) -> dict[str, Array]:
        """Pad a row to these sizes."""
        filled = dict(row)
        for name in self._buckets.inputs:
            values = row[name]
            if (shape := self._buckets.padded_shape(name, values.shape, sizes)) != values.shape:
                filled[name] = np.full(shape, self._buckets.value(name), values.dtype)
                filled[name][tuple(map(slice, values.shape))] = values
        return filled

    def changed_behind(self, names: str, real: Lengths, lengths: Lengths, is_hidden: bool) -> Sequence[Feed]:
        """Return two rows that differ only after the lengths `real`, where everything or nothing is hidden. `names`:
        the names of the two rows that supply the values."""
        one, other = (self.row(name, lengths) for name in names)
        if one is None or other is None:
            return ()
        changed = {
            name: self._joined(one[name], other[name], name, real)
            for name in self._buckets.inputs
            if name not in self._hiding
        }
        rows = [one, {**one, **changed}]
        return [self._hidden(row, real) or row for row in rows] if is_hidden else rows

    def _hidden(self, row: Feed, real: Sequence[int]) -> dict[str, Array] | None:
        """Return the row with everything hidden after these lengths; None if nothing hides."""
        changed = {
            name: self._joined(row[name], np.full_like(row[name], self._buckets.value(name)), name, real)
            for name in self._hiding - self._reading.lengths
        }
        changed |= {name: np.full_like(row[name], min(real)) for name in self._reading.lengths}
        return {**row, **changed} if changed else None

    def _joined(self, first: Array, behind: Array, name: str, lengths: Sequence[int]) -> Array:
        """Return an input with the values of `first` up to these lengths."""
        joined, real = np.array(behind), [slice(None)] * first.ndim
        for place, index in self._buckets.inputs[name]:
            real[place] = slice(lengths[index])
        joined[tuple(real)] = first[tuple(real)]
        return joined

    def _shown(self, name: str) -> float:
        """Return the value of real elements in an input that hides."""
        fill = self._buckets.value(name)
        return 1.0 - fill if fill in (0.0, 1.0) else 0.0


def unknown_lengths(inputs: Sequence[CheckedInput], padding: Padding) -> str:
    """Return why inputs of any length cannot be made; "" = they can."""
    known = {given.name: given for given in inputs}
    for one in padding.dimensions:
        if missing := one.inputs.keys() - known.keys():
            return f"input '{min(missing)}' has a default in the file"
        if not all(known[name].symbol(place) for name, places in one.inputs.items() for place in places):
            return f"the size '{one.label}' is a sum"
    return ""
