"""The types of this package: a model's inputs, and the function that runs it. Knows no engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rocserve.core.datatypes import DataType

Array = np.ndarray[Any, Any]
Feed = Mapping[str, Array]
"""A model's inputs or outputs by name. Strings are object arrays of str or bytes. BF16 inputs are uint16 arrays of
their bits, BF16 outputs float32 arrays of their values."""
Run = Callable[[Feed], Feed]
"""Runs the model. Any exception means that the engine refuses the input."""

ROWS = "<rows>"
"""A dimension that counts the rows of a batch."""


@dataclass(frozen=True, slots=True)
class CheckedInput:
    """An input, from the model's file or signature."""

    name: str
    datatype: DataType
    shape: tuple[int | str, ...]
    """Numbers, and names of open dimensions. Equal names are one size, "past + 1" is a sum, each "" is a separate
    size. The first dimension is ROWS if it counts rows; an input without ROWS is one for all rows of a batch."""
    end: int | None = None
    """Exclusive end of an integer input's values, if the model defines it."""
    least: int = 0
    """Least value of an integer input."""

    @property
    def has_rows(self) -> bool:
        return self.shape[:1] == (ROWS,)

    @property
    def is_mask(self) -> bool:
        return "mask" in self.name.lower()

    @property
    def is_length(self) -> bool:
        return "len" in self.name.lower() and len(self.shape) <= 1 + self.has_rows

    @property
    def kind(self) -> str:
        """numpy's kind of its values: "f" (with BF16), "i", "u", "b" or "O"."""
        return "f" if self.datatype is DataType.BF16 else self.datatype.numpy_dtype.kind

    def open_dimensions(self) -> Iterator[str]:
        """Yield the names of the open dimensions but ROWS; an unnamed one gets a name from its place."""
        for index, size in enumerate(self.shape):
            for part in self._parts(index, size):
                if isinstance(part, str) and part != ROWS:
                    yield part

    def symbol(self, place: int) -> str:
        """Return the name of the open dimension at a place; "" if it is a number or a sum."""
        first, *others = self._parts(place, self.shape[place])
        return first if isinstance(first, str) and not others else ""

    def shape_with(self, sizes: Mapping[str, int], rows: int = 1) -> tuple[int, ...]:
        """Return the shape with these sizes of the open dimensions."""
        known = {**sizes, ROWS: rows}
        return tuple(
            sum(part if isinstance(part, int) else known[part] for part in self._parts(index, size))
            for index, size in enumerate(self.shape)
        )

    def _parts(self, index: int, size: int | str) -> Sequence[int | str]:
        if isinstance(size, int):
            return (size,)
        if not size:
            return (f"{self.name}[{index}]",)
        return [int(part) if part.isdigit() else part for part in size.split(" + ")]


def largest_integer(datatype: DataType) -> int:
    """Return the largest value of an integer type."""
    bits = 8 * datatype.itemsize
    return int(2 ** (bits - (datatype.numpy_dtype.kind == "i")) - 1)
