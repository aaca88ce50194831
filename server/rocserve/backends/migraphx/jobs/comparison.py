"""How far two results of a network are apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rocserve.backends.migraphx.configuration.options import Precision

Array = np.ndarray[Any, Any]

TOLERANCES: Mapping[Precision, float] = {
    Precision.FP32: 0.01,
    Precision.FP16: 0.05,
    Precision.BF16: 0.25,
    Precision.INT8: 0.25,
    Precision.FP8: 0.4,
}
"""The `distance` up to which results of the same rows in batches of other sizes count as equal. Generous: kernels for
other sizes round otherwise, while rows that are mixed up are about 1 apart."""

_NOTHING = 1e-6
"""Per element; errors of what should be 0 are measured against it."""


def distance(found: Array, expected: Array, datatype: str) -> float:
    """Of floats the length of the difference against that of `expected`; of others the share that differs.

    `datatype` is MIGraphX's name. Infinite where shapes differ, or not the same elements are numbers.
    """
    if found.shape != expected.shape:
        return float("inf")
    if found.size == 0 or found.tobytes() == expected.tobytes():
        return 0.0
    found, expected = _numbers(found, datatype), _numbers(expected, datatype)
    if not np.issubdtype(expected.dtype, np.floating):
        return float(np.mean(found != expected))
    finite = np.isfinite(expected)
    if not np.array_equal(found[~finite], expected[~finite], equal_nan=True) or not np.isfinite(found[finite]).all():
        return float("inf")
    error = np.linalg.norm(found[finite] - expected[finite])
    return float(error / (np.linalg.norm(expected[finite]) + _NOTHING * np.sqrt(finite.sum())))


def _numbers(values: Array, datatype: str) -> Array:
    """Floats as FP64; bf16 comes as its bits."""
    if datatype == "bf16":
        bits: Array = values.astype(np.uint32) << 16
        return bits.view(np.float32).astype(np.float64)
    return values.astype(np.float64) if np.issubdtype(values.dtype, np.floating) else values
