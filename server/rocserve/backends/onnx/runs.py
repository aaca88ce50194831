"""Ways to run a session: as it is, with BF16 tensors, at fixed batch sizes. Each is safe on several threads at once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime

from rocserve.backends.batch_sizes import Arrays, run_in_pieces
from rocserve.core.datatypes import DataType
from rocserve.core.requests import Signature

Array = np.ndarray[Any, Any]

Run = Callable[[Sequence[str], Mapping[str, Array]], Sequence[Array]]
"""From the names of the outputs that are wanted and all inputs to those outputs. BF16 goes as its uint16 bits."""

_ONNX_BFLOAT16 = 16
"""TensorProto.DataType.BFLOAT16 (onnx.proto)."""


def session_run(session: Any, signature: Signature) -> Run:
    """The way that suits the session's datatypes."""
    if any(spec.datatype is DataType.BF16 for spec in (*signature.inputs, *signature.outputs)):
        return Bfloat16Run(session, signature)
    run: Run = session.run
    return run


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
        self._runs = runs
        self._sizes = tuple(sorted(runs))
        self._pad_with_first_row = pad_with_first_row

    def __call__(self, wanted: Sequence[str], inputs: Mapping[str, Array]) -> Sequence[Array]:
        def run(piece: Arrays) -> Arrays:
            rows = len(next(iter(piece.values())))
            return dict(zip(wanted, self._runs[rows](wanted, piece), strict=True))

        outputs = run_in_pieces(inputs, self._sizes, run, self._pad_with_first_row)
        return [outputs[name] for name in wanted]


def _array(value: Any) -> Array:
    if value.element_type() != _ONNX_BFLOAT16:
        return np.asarray(value.numpy())
    size = value.tensor_size_in_bytes()
    data = ctypes.string_at(value.data_ptr(), size) if size else b""
    return np.frombuffer(data, dtype=np.uint16).reshape(value.shape())
