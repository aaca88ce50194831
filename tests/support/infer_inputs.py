"""Inputs of requests for tritonclient, over gRPC or HTTP."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import tritonclient.grpc
from tritonclient.utils import np_to_triton_dtype


def infer_input(name: str, array: np.ndarray[Any, Any], library: ModuleType = tritonclient.grpc) -> Any:
    """An input with the shape and datatype of the array. `library` is tritonclient.grpc or tritonclient.http."""
    entry = library.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    entry.set_data_from_numpy(array)
    return entry
