"""Converts between tensors and a request's part of a result."""

from __future__ import annotations

from collections.abc import Sequence

from rocserve.core.tensors import Tensor, heads_of
from rocserve.workers.results import Outputs


def outputs_from(tensors: Sequence[Tensor]) -> Outputs:
    return heads_of(tensors), [tensor.data for tensor in tensors]


def tensors_of(outputs: Outputs) -> list[Tensor]:
    heads, data = outputs
    return [Tensor(*head, one) for head, one in zip(heads, data, strict=True)]
