"""Runs the sessions of a model: plainly, with BF16 tensors, into given memory, or at fixed batch sizes. Each way is
safe on several threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime

from rocserve.backends.base import Batch
from rocserve.backends.batch_sizes import pieces
from rocserve.backends.dropped_sizes import with_dropped_sizes
from rocserve.core.datatypes import DataType
from rocserve.core.errors import internal
from rocserve.core.requests import Signature, TensorSpec

Array = np.ndarray[Any, Any]

Run = Callable[[Sequence[str], Mapping[str, Array]], Sequence[Array]]
"""Takes the names of the wanted outputs and all inputs; returns the wanted outputs. BF16 is passed as uint16 bits."""

_ONNX_BFLOAT16 = 16
"""TensorProto.DataType.BFLOAT16 in onnx.proto."""


def session_run(session: Any, signature: Signature, options: Any = None) -> Run:
    """Return the function that runs a session. `options`: onnxruntime.RunOptions for all runs."""
    tensors = (*signature.inputs, *signature.outputs)
    if not any(spec.datatype is DataType.BF16 for spec in tensors):
        run: Run = session.run
        return run if options is None else lambda wanted, inputs: session.run(wanted, inputs, options)
    # numpy has no BF16.
    bfloat16 = frozenset(spec.name for spec in signature.inputs if spec.datatype is DataType.BF16)

    def run_with_bfloat16(wanted: Sequence[str], inputs: Mapping[str, Array]) -> Sequence[Array]:
        values = {
            name: onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, _ONNX_BFLOAT16)
            if name in bfloat16
            else onnxruntime.OrtValue.ortvalue_from_numpy(array)
            for name, array in inputs.items()
        }
        outputs = []
        for value in session.run_with_ort_values(wanted, values, options):
            if value.element_type() == _ONNX_BFLOAT16:
                size = value.tensor_size_in_bytes()
                data = ctypes.string_at(value.data_ptr(), size) if size else b""
                outputs.append(np.frombuffer(data, dtype=np.uint16).reshape(value.shape()))
            else:
                outputs.append(np.asarray(value.numpy()))
        return outputs

    return run_with_bfloat16


def is_on_cpu(session: Any) -> bool:
    """Return whether the whole session runs on the CPU, in this process's memory."""
    return bool(session.get_providers() == ["CPUExecutionProvider"])


class InPlaceRun:
    """Runs a session whose outputs go into `Batch.room`, instead of memory that the engine allocates."""

    def __init__(self, session: Any, signature: Signature, batching: bool) -> None:
        """`batching`: whether the first dimension of outputs is the batch."""
        self._session = session
        self._first = int(batching)
        self._shapes = {spec.name: spec.shape[self._first :] for spec in signature.outputs}

    def fits(self, batch: Batch) -> bool:
        """Return whether the batch has room for all wanted outputs, in shapes that the model may give, and the outputs
        are large."""
        room = batch.room
        # From 256 KiB on, letting the engine write a batch's outputs to their place is faster than copying them.
        if sum([array.nbytes for array in room.values()]) < (256 << 10):
            return False
        return all(name in room and self._may_have(name, room[name].shape) for name in batch.requested_outputs)

    def _may_have(self, name: str, shape: tuple[int, ...]) -> bool:
        own, declared = shape[self._first :], self._shapes[name]
        return len(own) == len(declared) and all(dim in (-1, size) for dim, size in zip(declared, own, strict=True))

    def __call__(self, batch: Batch, inputs: Mapping[str, Array]) -> Sequence[Array]:
        """Run the batch, and return the room's arrays, which then hold the outputs."""
        outputs = [batch.room[name] for name in batch.requested_outputs]
        binding = self._session.io_binding()
        for name, array in inputs.items():
            binding.bind_cpu_input(name, array)
        for name, array in zip(batch.requested_outputs, outputs, strict=True):
            binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        self._session.run_with_iobinding(binding)
        return outputs


class SizedRun:
    """Runs batches on sessions that each take one batch size: pads and cuts the batches to the sizes."""

    def __init__(self, runs: Mapping[int, Run], pad_with_first_row: bool, outputs: Sequence[TensorSpec] = ()) -> None:
        """`pad_with_first_row`: pad with copies of the first row, which every model accepts, instead of zeros.
        `outputs`: what the model declares."""
        self._declared = {spec.name: spec.shape for spec in outputs if not spec.any_rank}
        self._runs = runs
        self._sizes = tuple(sorted(runs))
        self._pad_with_first_row = pad_with_first_row

    def __call__(self, wanted: Sequence[str], inputs: Mapping[str, Array]) -> Sequence[Array]:
        results = []
        for own, size in pieces(len(next(iter(inputs.values()))), self._sizes):
            rows, given = own.stop - own.start, {name: array[own] for name, array in inputs.items()}
            if rows < size:
                for name, array in given.items():
                    given[name] = padded = np.empty((size, *array.shape[1:]), array.dtype)
                    padded[:rows] = array
                    # Object arrays hold text, which has no zero.
                    padded[rows:] = array[:1] if self._pad_with_first_row or array.dtype == np.object_ else 0
            outputs = list(self._runs[size](wanted, given))
            for index, name in enumerate(wanted) if size == 1 else ():
                whole = with_dropped_sizes(self._declared.get(name, ()), outputs[index].shape)
                outputs[index] = outputs[index] if whole is None else outputs[index].reshape(whole)
            for name, output in zip(wanted, outputs, strict=True):
                if output.shape[:1] != (size,):
                    raise internal(
                        f"output '{name}' has shape {list(output.shape)} for a batch of {size}; its first dimension"
                        " must be the batch"
                    )
            results.append([output[:rows] for output in outputs])
        return results[0] if len(results) == 1 else [np.concatenate(parts) for parts in zip(*results, strict=True)]
