"""Ways to run a session: as it is, into memory that is given, with BF16 tensors, at fixed batch sizes. Each is safe on
several threads at once."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime

from rocserve.backends.base import Batch
from rocserve.backends.batch_sizes import Piece, pieces
from rocserve.core.datatypes import DataType
from rocserve.core.errors import internal
from rocserve.core.requests import Signature

Array = np.ndarray[Any, Any]

Run = Callable[[Sequence[str], Mapping[str, Array]], Sequence[Array]]
"""From the names of the outputs that are wanted and all inputs to those outputs. BF16 goes as its uint16 bits."""

_PLACED_FROM = 256 << 10
"""Bytes of outputs from which on telling where they go takes less time than copying them there."""
_ONNX_BFLOAT16 = 16
"""TensorProto.DataType.BFLOAT16 (onnx.proto)."""


def session_run(session: Any, signature: Signature) -> Run:
    """The way that suits the session's datatypes."""
    if any(spec.datatype is DataType.BF16 for spec in (*signature.inputs, *signature.outputs)):
        return Bfloat16Run(session, signature)
    run: Run = session.run
    return run


def placed_run(session: Any, signature: Signature, batching: bool) -> PlacedRun | None:
    """None: the session's outputs are not on the CPU, or their sizes do not follow from the rows of a batch."""
    fixed = all(
        spec.datatype not in (DataType.BYTES, DataType.BF16) and -1 not in spec.shape[int(batching) :]
        for spec in signature.outputs
    )
    takes_bf16 = any(spec.datatype is DataType.BF16 for spec in signature.inputs)
    return PlacedRun(session, signature, batching) if fixed and is_on_cpu(session) and not takes_bf16 else None


def is_on_cpu(session: Any) -> bool:
    """Whether all of it runs on the CPU, in memory of this process."""
    return bool(session.get_providers() == ["CPUExecutionProvider"])


class PlacedRun:
    """Has a session write its outputs into a batch's room; without, it is given memory of the engine's own."""

    def __init__(self, session: Any, signature: Signature, batching: bool) -> None:
        """`batching`: whether outputs have the batch's rows."""
        self._session = session
        self._first = int(batching)
        self._shapes = {spec.name: spec.shape[self._first :] for spec in signature.outputs}
        self._row_bytes = sum(math.prod(self._shapes[spec.name]) * spec.datatype.itemsize for spec in signature.outputs)

    def suits(self, batch: Batch) -> bool:
        """Whether the batch has room for all outputs that it wants, and they are large."""
        if sum(batch.request_sizes) * self._row_bytes < _PLACED_FROM:
            return False
        room = batch.room
        return all(
            name in room and room[name].shape[self._first :] == self._shapes[name] for name in batch.requested_outputs
        )

    def __call__(self, batch: Batch, inputs: Mapping[str, Array]) -> Sequence[Array]:
        """The arrays of the room, which hold the outputs now."""
        outputs = [batch.room[name] for name in batch.requested_outputs]
        binding = self._session.io_binding()
        for name, array in inputs.items():
            binding.bind_cpu_input(name, array)
        for name, place in zip(batch.requested_outputs, outputs, strict=True):
            binding.bind_output(name, "cpu", 0, place.dtype, place.shape, place.ctypes.data)
        self._session.run_with_iobinding(binding)
        return outputs


class Bfloat16Run:
    """A session with BF16 inputs or outputs, which numpy arrays cannot name."""

    def __init__(self, session: Any, signature: Signature) -> None:
        self._session = session
        self._inputs = frozenset(spec.name for spec in signature.inputs if spec.datatype is DataType.BF16)

    def __call__(self, wanted: Sequence[str], inputs: Mapping[str, Array]) -> Sequence[Array]:
        values = {
            name: onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, _ONNX_BFLOAT16)
            if name in self._inputs
            else onnxruntime.OrtValue.ortvalue_from_numpy(array)
            for name, array in inputs.items()
        }
        return [_array(value) for value in self._session.run_with_ort_values(wanted, values)]


class SizedRun:
    """Sessions that each take one batch size; batches are padded and cut to them."""

    def __init__(self, runs: Mapping[int, Run], pad_with_first_row: bool) -> None:
        """`pad_with_first_row`: pad with copies of the first row, which the model takes for sure, else with zeros."""
        self._runs = runs
        self._sizes = tuple(sorted(runs))
        self._pad_with_first_row = pad_with_first_row

    def __call__(self, wanted: Sequence[str], inputs: Mapping[str, Array]) -> Sequence[Array]:
        rows = len(next(iter(inputs.values())))
        results = [self._run_piece(wanted, inputs, piece) for piece in pieces(rows, self._sizes)]
        return results[0] if len(results) == 1 else [np.concatenate(parts) for parts in zip(*results, strict=True)]

    def _run_piece(self, wanted: Sequence[str], inputs: Mapping[str, Array], piece: Piece) -> Sequence[Array]:
        given = {name: self._padded(array, piece) for name, array in inputs.items()}
        outputs = self._runs[piece.batch_size](wanted, given)
        for name, output in zip(wanted, outputs, strict=True):
            if output.shape[:1] != (piece.batch_size,):
                raise internal(
                    f"output '{name}' has shape {list(output.shape)} for a batch of {piece.batch_size}; its first"
                    " dimension must be the batch"
                )
        return [output[: piece.rows] for output in outputs]

    def _padded(self, array: Array, piece: Piece) -> Array:
        rows = array[piece.start : piece.start + piece.rows]
        if piece.rows == piece.batch_size:
            return rows
        padded = np.empty((piece.batch_size, *array.shape[1:]), array.dtype)
        padded[: piece.rows] = rows
        # Objects are text, for which there is no zero.
        padded[piece.rows :] = rows[:1] if self._pad_with_first_row or array.dtype == np.object_ else 0
        return padded


def _array(value: Any) -> Array:
    if value.element_type() != _ONNX_BFLOAT16:
        return np.asarray(value.numpy())
    size = value.tensor_size_in_bytes()
    data = ctypes.string_at(value.data_ptr(), size) if size else b""
    return np.frombuffer(data, dtype=np.uint16).reshape(value.shape())
