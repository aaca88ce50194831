"""Describes a session to the load check: its inputs, and a function that runs it on the check's tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime

from rocserve.backends.dropped_sizes import with_dropped_sizes
from rocserve.backends.onnx.runs import session_run
from rocserve.backends.onnx.signature import DATATYPES
from rocserve.backends.onnx.strings import text_array
from rocserve.core.datatypes import DataType
from rocserve.core.model_config import ModelConfig
from rocserve.core.requests import Signature, TensorSpec
from rocserve.core.tensors import bfloat16_values
from rocserve.load_check.tensors import ROWS, Array, CheckedInput, Feed, Run

Sizes = Mapping[str, Sequence[int]]
"""Input -> the sizes of its dimensions without the rows, -1 = any. Inputs may be missing."""


def configured_sizes(config: ModelConfig, has_rows: bool) -> Sizes:
    """Return the inputs' sizes in a configuration."""
    first = int(has_rows and config.max_batch_size == 0)
    return {entry.name: entry.model_dims[first:] for entry in config.inputs if not entry.any_rank}


def checked_inputs(session: Any, sizes: Sizes, has_rows: bool) -> Sequence[CheckedInput]:
    """Describe the inputs that each request has. `has_rows`: the first dimension of each counts rows."""
    first = int(has_rows)
    shapes: dict[str, list[Any]] = {
        # ONNX Runtime gives no dimensions for a tensor without a shape.
        node.name: node.shape or [None] * (first + len(sizes[node.name]) if node.name in sizes else 0)
        for node in session.get_inputs()
    }
    rows = {shape[0] for shape in shapes.values() if shape and isinstance(shape[0], str)} if has_rows else set()
    known = {
        shape[place] or (name, place): size
        for name, shape in shapes.items()
        for place, size in enumerate(sizes.get(name, ()), first)
        if place < len(shape) and size >= 0
    }

    def dimension(name: str, place: int, size: Any) -> int | str:
        if has_rows and (place == 0 or size in rows):
            return ROWS
        if isinstance(size, int) and size >= 0:
            return size
        return known.get(size or (name, place), size if isinstance(size, str) else "")

    return [
        CheckedInput(
            node.name,
            DATATYPES[node.type],
            tuple(dimension(node.name, place, size) for place, size in enumerate(shapes[node.name])),
        )
        for node in session.get_inputs()
    ]


def fixed_rows(session: Any, has_rows: bool) -> int | None:
    """Return the only number of rows that the session takes; None = it takes any."""
    first = [node.shape[0] if node.shape else None for node in session.get_inputs()] if has_rows else []
    return next((size for size in first if isinstance(size, int)), None)


def checked_run(session: Any, has_rows: bool) -> tuple[Run, Sequence[str]]:
    """Return a function that runs a session on the CPU as it serves, and the names of its outputs. One row keeps the
    dimensions of size 1 that the network drops. Each run gives its memory back."""
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    inputs, outputs = (
        tuple(TensorSpec(node.name, DATATYPES.get(node.type, DataType.BYTES), _declared(node.shape)) for node in nodes)
        for nodes in (session.get_inputs(), session.get_outputs())
    )
    run, names = session_run(session, Signature(inputs, outputs, False), options), [spec.name for spec in outputs]

    def answer(feed: Feed) -> Feed:
        given = {name: _texts(values) for name, values in feed.items()}
        found = run(names, given)
        is_one = has_rows and all(values.shape[:1] == (1,) for values in given.values())
        return {
            spec.name: served_output(spec, np.asarray(values), is_one)
            for spec, values in zip(outputs, found, strict=True)
        }

    return answer, names


def served_output(spec: TensorSpec, values: Array, is_one_row: bool) -> Array:
    """Return an output as the load check compares it: BF16 by its values, and one row in the shape of a batch."""
    if spec.datatype is DataType.BF16 and values.dtype == np.uint16:
        values = bfloat16_values(values)
    whole = with_dropped_sizes(spec.shape, values.shape) if is_one_row else None
    return values if whole is None else values.reshape(whole)


def _declared(shape: Sequence[Any]) -> tuple[int, ...]:
    return tuple(size if isinstance(size, int) else -1 for size in shape)


def _texts(values: Array) -> Array:
    """Return text in ONNX Runtime's form; warm-up samples have bytes."""
    is_bytes = values.dtype == np.object_ and any(isinstance(value, bytes) for value in values.flat)
    return text_array(values) if is_bytes else values
