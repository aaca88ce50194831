"""Finds the limits of inputs that a program uses as indices into tensors of a fixed size.

An index out of range is an error in PyTorch on the CPU, but compiled code ends the process, and a GPU is lost to the
process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rocserve.backends.base import Batch
from rocserve.backends.pytorch.exported_file import operator_name
from rocserve.core.device_references import References
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.tensors import Tensor, tensor_from_numpy

Limits = tuple[int, ...]
"""The least and the largest value; empty = unknown."""


def index_limits(exported: Any) -> Mapping[str, Limits]:
    """Return the limits by input name, for a program of torch.export."""
    found: dict[str, Limits] = {}
    for node in exported.graph.nodes:
        for tensor, dimension, index, counts_from_end in _indexed_tensors(node):
            shape = tensor.meta["val"].shape
            source = _index_input(index)
            if source is None or not shape or not isinstance(shape[dimension], int):
                continue
            size = shape[dimension]
            least, most = found.get(source, (-size, size - 1))
            found[source] = max(least, -size if counts_from_end else 0), min(most, size - 1)
    return found


def within_limits(batch: Batch, limits: Mapping[str, Limits]) -> tuple[dict[int, ServeError], Mapping[str, Tensor]]:
    """Return the errors of requests with values out of range, by position in the batch, and the batch's inputs with
    valid values instead. `limits`: by input. Values on a GPU are not checked because another model has made them."""
    failures: dict[int, ServeError] = {}
    inputs: dict[str, Tensor] = {}
    for name, (least, most) in limits.items():
        tensor = batch.inputs[name]
        if type(tensor.data) is References:
            continue
        values = tensor.numpy()
        if not values.size or (values.min() >= least and values.max() <= most):
            continue
        wrong = (values < least) | (values > most)
        inputs[name] = tensor_from_numpy(
            name, np.where(wrong, values.dtype.type(max(least, 0)), values), tensor.datatype
        )
        start = 0
        for position, rows in enumerate(batch.request_sizes):
            own = slice(start, start + rows) if len(batch.request_sizes) > 1 else slice(None)
            start += rows
            if wrong[own].any():
                value = values[own][wrong[own]].flat[0]
                text = f"input '{name}' has the value {value}, and its program takes {least} to {most}"
                failures.setdefault(position, invalid_argument(text))
    return failures, {**batch.inputs, **inputs}


def _indexed_tensors(node: Any) -> list[tuple[Any, int, Any, bool]]:
    """Return a node's indexed tensors with dimension, index, and whether the index may count from the end."""
    name, args = operator_name(node), node.args
    # Operator -> positions of its arguments: the tensor that is indexed along its first dimension, and the index.
    embeddings = {"aten::embedding": (0, 1), "aten::_embedding_bag": (0, 1), "aten::embedding_bag": (0, 1)}
    if name in embeddings:
        tensor, index = embeddings[name]
        return [(args[tensor], 0, args[index], False)]
    # Operators called with a tensor, a dimension and an index.
    indexed_along = ("aten::index_select", "aten::gather", "aten::index_add", "aten::index_copy", "aten::scatter",
                     "aten::scatter_add")  # fmt: skip
    if name in indexed_along:
        return [(args[0], args[1], args[2], False)]
    # Called with a tensor and a list of indices; a negative index counts from the end.
    if name in {"aten::index", "aten::index_put"}:
        return [(args[0], position, index, True) for position, index in enumerate(args[1]) if index is not None]
    return []


def _index_input(index: Any) -> str | None:
    """Return the name of the input that holds the index's values; None = the values are computed."""
    # Operators whose result has exactly the values of their argument.
    value_preserving = {
        f"aten::{name}"
        for name in (
            "view", "reshape", "unsqueeze", "squeeze", "expand", "permute", "transpose", "t", "clone", "contiguous",
            "alias", "flatten", "unflatten", "detach", "repeat", "_to_copy", "to",
        )
    }  # fmt: skip
    while isinstance(index, torch.fx.Node):
        value = index.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dtype not in (torch.int64, torch.int32):
            return None
        if index.op == "placeholder":
            return str(index.name)
        if operator_name(index) not in value_preserving:
            return None
        index = index.args[0]
    return None
