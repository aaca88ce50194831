"""MIGraphX's datatypes, by the names it prints (without "_type"), and the numpy arrays that hold them."""

from __future__ import annotations

from typing import Any

import numpy as np

_NUMPY = {
    "bool": np.bool_,
    "half": np.float16,
    "float": np.float32,
    "double": np.float64,
    "uint8": np.uint8,
    "int8": np.int8,
    "uint16": np.uint16,
    "int16": np.int16,
    "int32": np.int32,
    "int64": np.int64,
    "uint32": np.uint32,
    "uint64": np.uint64,
    # numpy has no names for the rest: arrays hold their bits.
    "fp8e4m3fnuz": np.uint8,
    "fp8e4m3fn": np.uint8,
    "fp8e5m2": np.uint8,
    "bf16": np.uint16,
    "fp8e5m2fnuz": np.uint8,
}
IN_ORDER = tuple(_NUMPY)
"""As MIGraphX numbers them, from its bool on."""
AS_BITS = frozenset({"fp8e4m3fnuz", "fp8e4m3fn", "fp8e5m2", "bf16", "fp8e5m2fnuz"})


def numpy_dtype(datatype: str) -> np.dtype[Any] | None:
    """None: arrays cannot hold it (tuples, four-bit numbers)."""
    found = _NUMPY.get(datatype)
    return None if found is None else np.dtype(found)
