"""The sizes of a program's inputs that vary, and how they go together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rocserve.core.errors import invalid_argument

UNBOUNDED = 1 << 31
"""torch.export gives a size without a bound a larger one."""
LEAST_TRIED = 2
"""torch.export's lower bound of a size that it has not tried with 0 and 1, which work."""


@dataclass(frozen=True, slots=True)
class OpenSize:
    """A size that varies: `factor` times a number, and `offset` more."""

    number: str
    """By this name; in all sizes of the program that have it it is the same."""
    factor: int
    offset: int
    least: int
    most: int | None


def open_size(size: Any, bounds: Mapping[Any, Any]) -> OpenSize | None:
    """One of PyTorch's; `bounds`: of the numbers in them. None: it is fixed, or depends on several numbers."""
    if isinstance(size, int) or len(size.node.expr.free_symbols) != 1:
        return None
    (symbol,) = size.node.expr.free_symbols
    factor, offset = size.node.expr.coeff(symbol), size.node.expr.subs(symbol, 0)
    if not (factor.is_Integer and factor > 0 and size.node.expr == factor * symbol + offset):
        return None
    own = bounds.get(symbol)
    least = 0 if own is None or own.lower <= LEAST_TRIED else int(own.lower)
    most = None if own is None or not own.upper < UNBOUNDED else int(own.upper)
    return OpenSize(str(symbol), int(factor), int(offset), least, most)


def check_sizes(inputs: Sequence[tuple[str, Sequence[OpenSize | None]]], values: Sequence[Any]) -> None:
    """Compare inputs' sizes, as the program itself does: what Inductor makes of it would read beyond their ends.

    Args:
        inputs: their names, and for each dimension how it varies.

    Raises:
        ServeError: INVALID_ARGUMENT, sizes do not go together, or are out of the bounds that it was exported with.
    """
    numbers: dict[str, tuple[int, str]] = {}
    for (name, sizes), value in zip(inputs, values, strict=True):
        for dimension, (own, size) in enumerate(zip(sizes, value.shape, strict=True)):
            if own is None:
                continue
            number, rest = divmod(size - own.offset, own.factor)
            what = f"dimension {dimension} of input '{name}' is {size}"
            if rest or number < own.least or (own.most is not None and number > own.most):
                most = "" if own.most is None else f", at most {own.factor * own.most + own.offset}"
                raise invalid_argument(
                    f"{what}; its program was exported for {own.factor * own.least + own.offset} at least{most}"
                    f"{f', in steps of {own.factor}' if own.factor > 1 else ''}"
                )
            before, other = numbers.setdefault(own.number, (number, what))
            if before != number:
                raise invalid_argument(f"{other}, and {what}; its program was exported for sizes that go together")
