"""Turns an output into its highest values, as `value:index:label` strings (KServe's classification extension)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rocserve.core.datatypes import DataType
from rocserve.core.errors import invalid_argument
from rocserve.core.tensors import Tensor, encode_bytes_elements

_MOST_VALUES = 1 << 20
"""Sorting more values would keep all other requests waiting for more than 100 ms."""
_MOST_CLASSES = 1 << 16
"""Formatting more classes of one answer would take more than 60 ms."""


def classify(tensor: Tensor, class_count: int, labels: Sequence[str], batching: bool) -> Tensor:
    """Return the highest elements of each row (without batching, of the whole tensor), highest first, as BYTES of shape
    [rows, n] or [n]. An element reads `value:index`, or `value:index:label` if the model has a label for the index. Of
    equal values the lower index comes first. Raises ServeError (INVALID_ARGUMENT) for BYTES, BF16 or a large output."""
    if tensor.datatype in (DataType.BYTES, DataType.BF16):
        raise invalid_argument(
            f"class result not available for output due to unsupported type '{tensor.datatype.value}'"
        )
    rows, *dims = tensor.shape if batching and tensor.shape else (1, *tensor.shape)
    values = tensor.numpy().reshape(rows, math.prod(dims))
    count = min(class_count, values.shape[1])
    if values.size > _MOST_VALUES or rows * count > _MOST_CLASSES:
        raise invalid_argument(
            f"class result not available for output with {values.size} values and {rows * count} classes, at most"
            f" {_MOST_VALUES} and {_MOST_CLASSES} can be"
        )
    order = np.argsort(-values.astype(np.float64), axis=1, kind="stable")[:, :count]
    texts = [_text(values[row, index], int(index), labels) for row in range(rows) for index in order[row]]
    shape = (rows, count) if batching else (count,)
    return Tensor(tensor.name, DataType.BYTES, shape, encode_bytes_elements(texts))


def _text(value: np.generic, index: int, labels: Sequence[str]) -> str:
    number = f"{float(value):f}" if isinstance(value, np.floating) else str(int(value))
    label = labels[index] if index < len(labels) else ""
    return f"{number}:{index}:{label}" if label else f"{number}:{index}"
