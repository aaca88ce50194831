"""Measures the difference of two arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from rocserve.load_check.tensors import Array, Feed

_LEAST = 1e-30
"""Replaces the largest value of an array of zeros, to avoid a division by 0."""


NOTHING: Mapping[str, float] = MappingProxyType({})


def difference(one: Array, other: Array, least: float = _LEAST) -> float:
    """Return the largest difference, relative to the largest finite value of both, or to `least` if that is larger. It
    is inf if shapes differ, texts differ, or NaN and infinities are not at the same places."""
    if one.shape != other.shape:
        return math.inf
    if one.dtype.kind not in "fiub" or other.dtype.kind not in "fiub":
        return 0.0 if np.array_equal(_texts(one), _texts(other)) else math.inf
    if np.array_equal(one, other):
        return 0.0
    x, y = one.astype(np.float64), other.astype(np.float64)
    finite = np.isfinite(x)
    if not np.array_equal(x[~finite], y[~finite], equal_nan=True) or not np.isfinite(y[finite]).all():
        return math.inf
    scale = max(least, largest(x), largest(y))
    return float(np.abs(x[finite] - y[finite]).max(initial=0.0)) / scale


def differences(one: Feed, other: Feed, *, least: Mapping[str, float] = NOTHING) -> dict[str, float]:
    """Return the difference of each array of `one`; inf for arrays missing in `other`. `least`: see `difference`."""
    return {
        name: difference(array, other[name], max(_LEAST, least.get(name, 0.0))) if name in other else math.inf
        for name, array in one.items()
    }


def largest(values: Array) -> float:
    """Return the largest finite value, without its sign; 0 for texts."""
    if values.dtype.kind not in "fiub":
        return 0.0
    numbers = values.astype(np.float64)
    return float(np.abs(numbers[np.isfinite(numbers)]).max(initial=0.0))


def by(size: float) -> str:
    """Return a difference as the end of a clause; "" for texts, and for NaN at other places, which have no distance."""
    return "" if math.isinf(size) else f" by {size:.2g}"


def furthest(one: Array, other: Array) -> tuple[int, ...]:
    """Return the place where two arrays of one shape, with elements, differ most: the first where only one is a number,
    if there is any."""
    if one.dtype.kind not in "fiub" or other.dtype.kind not in "fiub":
        apart = _texts(one) != _texts(other)
    else:
        x, y = one.astype(np.float64), other.astype(np.float64)
        with np.errstate(invalid="ignore"):
            apart = np.nan_to_num(np.abs(x - y), nan=math.inf, posinf=math.inf)
        apart = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, apart)
    return tuple(int(index) for index in np.unravel_index(int(np.argmax(apart)), apart.shape))


def example(right: Array, other: Array) -> str:
    """Return where two arrays differ most: "0.5 instead of 0.98 at [0, 3]", or their shapes."""
    if right.shape != other.shape:
        return f"shape {list(other.shape)} instead of {list(right.shape)}"
    if not right.size:
        return "no difference"
    place = furthest(right, other)
    return f"{_short(other[place])} instead of {_short(right[place])} at {[*place]}"


def _short(value: object) -> str:
    if isinstance(value, np.bool_):
        return str(value)
    return f"{value:.4g}" if isinstance(value, int | float | np.number) else repr(value)


def _texts(array: Array) -> Array:
    """Return texts as str: engines return bytes or str."""
    if array.dtype.kind != "O":
        return array.astype(str)
    decoded = [value.decode(errors="surrogateescape") if isinstance(value, bytes) else value for value in array.flat]
    return np.array(decoded, object).reshape(array.shape)
