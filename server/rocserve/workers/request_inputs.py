"""The requests of a batch, each for itself again, for a model that sees them so."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

from rocserve.core.datatypes import DataType
from rocserve.core.tensors import Buffer, Tensor, bytes_elements


def separate(inputs: Mapping[str, Tensor], request_sizes: Sequence[int]) -> list[dict[str, Tensor]]:
    """The inputs of each request, on memory of their own that may be kept and written to.

    Raises:
        ServeError: INVALID_ARGUMENT, the data of a BYTES input is not what its shape says.
    """
    if len(request_sizes) == 1:
        return [{name: _own(tensor, tensor.shape, tensor.data) for name, tensor in inputs.items()}]
    requests: list[dict[str, Tensor]] = [{} for _ in request_sizes]
    for name, tensor in inputs.items():
        view = memoryview(tensor.data)
        bounds = _bounds(tensor, request_sizes)
        for index, size in enumerate(request_sizes):
            requests[index][name] = _own(tensor, (size, *tensor.shape[1:]), view[bounds[index] : bounds[index + 1]])
    return requests


def _own(tensor: Tensor, shape: tuple[int, ...], data: Buffer) -> Tensor:
    return Tensor(tensor.name, tensor.datatype, shape, bytearray(data))


def _bounds(tensor: Tensor, request_sizes: Sequence[int]) -> list[int]:
    """Where each request's rows begin, and where the last one's end, in bytes."""
    row = math.prod(tensor.shape[1:])
    rows = (0, *accumulate(request_sizes))
    if tensor.datatype is not DataType.BYTES:
        return [count * row * tensor.datatype.itemsize for count in rows]
    elements = bytes_elements(tensor.data, tensor.element_count, tensor.name)
    ends = (0, *accumulate(4 + len(element) for element in elements))
    return [ends[count * row] for count in rows]
