"""The requests of a batch, each for itself again, for a model that sees them so."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

from rocserve.core.datatypes import DataType
from rocserve.core.tensors import Buffer, Tensor, bytes_elements

Shape = tuple[int, ...]

NOT_RAGGED: Mapping[str, Sequence[Shape]] = {}


def separate(
    inputs: Mapping[str, Tensor], request_sizes: Sequence[int], ragged: Mapping[str, Sequence[Shape]] = NOT_RAGGED
) -> list[dict[str, Tensor]]:
    """The inputs of each request, on memory of their own that may be kept and written to.

    Args:
        ragged: by input, the requests' shapes where they are not rows of the batch's.

    Raises:
        ServeError: INVALID_ARGUMENT, the data of a BYTES input is not what its shape says.
    """
    if len(request_sizes) == 1 and not ragged:
        return [{name: _own(tensor, tensor.shape, tensor.data) for name, tensor in inputs.items()}]
    requests: list[dict[str, Tensor]] = [{} for _ in request_sizes]
    for name, tensor in inputs.items():
        view = memoryview(tensor.data)
        shapes = ragged.get(name) or [(size, *tensor.shape[1:]) for size in request_sizes]
        bounds = _bounds(tensor, shapes)
        for index, shape in enumerate(shapes):
            requests[index][name] = _own(tensor, shape, view[bounds[index] : bounds[index + 1]])
    return requests


def _own(tensor: Tensor, shape: tuple[int, ...], data: Buffer) -> Tensor:
    return Tensor(tensor.name, tensor.datatype, shape, bytearray(data))


def _bounds(tensor: Tensor, shapes: Sequence[Shape]) -> list[int]:
    """Where each request's part begins, and where the last one's ends, in bytes."""
    counts = (0, *accumulate(map(math.prod, shapes)))
    if tensor.datatype is not DataType.BYTES:
        return [count * tensor.datatype.itemsize for count in counts]
    elements = bytes_elements(tensor.data, tensor.element_count, tensor.name)
    ends = (0, *accumulate(4 + len(element) for element in elements))
    return [ends[count] for count in counts]
