"""Makes batches for warming up a model, from the `model_warmup` samples of its config."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rocserve.backends.base import Batch
from rocserve.core.datatypes import DataType
from rocserve.core.errors import invalid_argument, unreadable
from rocserve.core.model_config import ModelConfig, WarmupInput, control_inputs, state_inputs
from rocserve.core.padding import Buckets, Padding
from rocserve.core.ragged import RaggedBatching
from rocserve.core.tensors import Tensor, encode_bytes_elements, filled_up, tensor_from_numpy

WARMUP_FOLDER = "warmup"
"""Folder of the samples' files in the model's folder (Triton's name)."""


def warm_up_samples(config: ModelConfig, model_folder: Path) -> Iterator[tuple[str, Batch]]:
    """Yield a sample's name and a batch for each run of each sample, in order. Raises ServeError (INVALID_ARGUMENT) if
    a sample's file cannot be read, is outside the folder `warmup`, or is too short."""
    added: dict[str, WarmupInput] = {}
    if (batching := config.sequence_batching) is not None:
        # Tensors that the server adds to a request's inputs; zeros if a sample does not have them.
        for tensor in (*control_inputs(batching), *state_inputs(batching)):
            dims = tuple(1 if size == -1 else size for size in tensor.dims)
            added[tensor.name] = WarmupInput(tensor.datatype, dims, "zero")
    for sample in config.model_warmup:
        rows = max(sample.batch_size, 1) if config.max_batch_size > 0 else 0
        inputs = {name: _tensor(name, entry, rows, model_folder) for name, entry in {**added, **sample.inputs}.items()}
        batch = Batch(inputs, tuple(output.name for output in config.outputs), (1,) * max(rows, 1))
        for _ in range(max(sample.count, 1)):
            yield sample.name, batch


def as_served(batch: Batch, config: ModelConfig, padding: Padding) -> Batch:
    """Return a batch as the engine gets it from the server: padded, or as one of requests of different shapes. Raises
    ServeError (INVALID_ARGUMENT) if it is larger than the largest sizes."""
    ragged, buckets = RaggedBatching(config), Buckets(padding)
    if buckets:
        return _padded(batch, buckets)
    if not ragged:
        return batch
    batching = config.max_batch_size > 0
    shapes = {
        name: [(size, *tensor.shape[1:]) for size in batch.request_sizes] if batching else [tensor.shape]
        for name, tensor in batch.inputs.items()
    }
    inputs = {
        name: replace(tensor, shape=(tensor.element_count,)) if name in ragged.inputs else tensor
        for name, tensor in batch.inputs.items()
    }
    made, cuts = ragged.parts(shapes)
    inputs.update((tensor.name, tensor) for tensor in made)
    return Batch(inputs, batch.requested_outputs, batch.request_sizes, cuts)


def _padded(batch: Batch, buckets: Buckets) -> Batch:
    try:
        lengths = buckets.lengths((name, tensor.shape) for name, tensor in batch.inputs.items())
        sizes = buckets.sizes_for(lengths)
    except ValueError as fault:
        raise invalid_argument(str(fault)) from None
    inputs: dict[str, Tensor] = {}
    for name, tensor in batch.inputs.items():
        inputs[name] = tensor
        if name in buckets.inputs:
            shape = buckets.padded_shape(name, tensor.shape, sizes)
            data = filled_up(tensor.datatype, shape, buckets.value(name), [(tensor.shape, tensor.data)])
            inputs[name] = Tensor(name, tensor.datatype, shape, data)
    padded = buckets.padded_outputs([lengths] * len(batch.request_sizes), sizes)
    return Batch(inputs, batch.requested_outputs, batch.request_sizes, padded=padded)


def _tensor(name: str, entry: WarmupInput, rows: int, model_folder: Path) -> Tensor:
    """Make an input. `rows`: 0 = the model has no batch dimension. All rows of a batch have the same data."""
    shape = (rows, *entry.dims) if rows else entry.dims
    count = math.prod(entry.dims)
    if entry.source.startswith("file:"):
        row = _file_content(entry.source.removeprefix("file:"), name, entry, model_folder)
    elif entry.source == "random":
        row = _random_row(entry.datatype, count)
    else:
        row = bytes(count * (entry.datatype.itemsize or 4))
    return Tensor(name, entry.datatype, shape, row * max(rows, 1))


def _random_row(datatype: DataType, count: int) -> bytes:
    """Return random values that are the same at each start, so that a model that fails on them fails every time."""
    generator = np.random.default_rng(0)
    if datatype is DataType.BYTES:
        return encode_bytes_elements(generator.bytes(8).hex() for _ in range(count))
    if datatype is DataType.BF16:
        values = generator.random(count, dtype=np.float32)
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    kind: np.dtype[Any] = datatype.numpy_dtype
    if kind.kind == "f":
        array = generator.random(count).astype(kind)
    elif kind.kind == "b":
        array = generator.integers(0, 2, count).astype(kind)
    else:
        array = generator.integers(0, np.iinfo(kind).max, count, dtype=kind)
    return bytes(tensor_from_numpy("", array, datatype).data)


def _file_content(filename: str, name: str, entry: WarmupInput, model_folder: Path) -> bytes:
    folder = (model_folder / WARMUP_FOLDER).resolve()
    path = (folder / filename).resolve()
    if not path.is_relative_to(folder):
        raise invalid_argument(
            f"warm-up file '{filename}' of input '{name}' is outside the model's folder '{WARMUP_FOLDER}'"
        )
    try:
        content = path.read_bytes()
    except OSError as error:
        raise unreadable(
            f"warm-up file '{filename}' of input '{name}' cannot be read: {error.strerror}", error
        ) from None
    expected = math.prod(entry.dims) * entry.datatype.itemsize
    if entry.datatype is DataType.BYTES:
        return content
    if len(content) < expected:
        raise invalid_argument(
            f"warmup setting expects {expected} bytes, but the data provided from {filename} only has"
            f" {len(content)} bytes (input '{name}')"
        )
    return content[:expected]
