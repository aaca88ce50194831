"""The onnx backend's engine, as a worker loads it."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as engine_errors

from rocserve.backends.base import Batch, BatchResult, LoadedModel, ModelSource
from rocserve.backends.onnx.session import open_session
from rocserve.backends.onnx.signature import session_signature
from rocserve.backends.parameters import require_cpu
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, internal, invalid_argument
from rocserve.core.model_config import ModelConfig
from rocserve.core.requests import Signature, TensorSpec
from rocserve.core.tensors import Tensor, tensor_from_numpy

_LOG = logging.getLogger(__name__)

_ONNX_BFLOAT16 = 16
"""TensorProto.DataType.BFLOAT16 (onnx.proto)."""


def load(model: ModelSource) -> LoadedModel:
    """Parameters: `engine` (auto, cpu, onnxruntime) and those of `session`.

    Raises:
        ServeError: INVALID_ARGUMENT; the file or the configuration is wrong.
    """
    require_cpu(model, cpu_engines=("cpu", "onnxruntime"), device_engines=("migraphx",))
    session = open_session(model)
    signature = session_signature(session, model.config)
    holds_bfloat16 = any(spec.datatype is DataType.BF16 for spec in (*signature.inputs, *signature.outputs))
    return (Bfloat16Model if holds_bfloat16 else OnnxModel)(session, signature, model.config)


class OnnxModel:
    """A session; safe to use on several threads at once. Running releases the GIL."""

    def __init__(self, session: Any, signature: Signature, config: ModelConfig) -> None:
        self._session = session
        self._signature = signature
        self._config = config
        self._takes_text = any(spec.datatype is DataType.BYTES for spec in signature.inputs)

    @property
    def signature(self) -> Signature:
        return self._signature

    def warm_up(self, samples: Sequence[Batch]) -> None:
        """Without samples: zeros, with 1 for each dimension that varies; a model that cannot take them is no fault."""
        for sample in samples:
            self.execute(sample)
        if samples:
            return
        try:
            self.execute(self._zeros())
        except ServeError as error:
            _LOG.info("model '%s' could not be warmed up with zeros: %s", self._config.name, error)

    def execute(self, batch: Batch) -> BatchResult:
        """
        Raises:
            ServeError: INVALID_ARGUMENT where ONNX Runtime blames the inputs, else INTERNAL, in its own words.
        """
        inputs = self._inputs(batch)
        try:
            return BatchResult(self._run(batch.requested_outputs, inputs))
        except (engine_errors.InvalidArgument, ValueError) as error:
            raise invalid_argument(f"onnx runtime error: {error}") from None
        except Exception as error:
            # The binding's exceptions have no base class of their own.
            raise internal(f"onnx runtime error: {error}") from None

    def close(self) -> None:
        del self._session

    def _inputs(self, batch: Batch) -> Mapping[str, np.ndarray[Any, Any]]:
        if not self._takes_text:
            return batch.arrays
        return {
            name: _text_array(tensor) if tensor.datatype is DataType.BYTES else tensor.numpy()
            for name, tensor in batch.inputs.items()
        }

    def _run(
        self, wanted: tuple[str, ...], inputs: Mapping[str, np.ndarray[Any, Any]]
    ) -> Mapping[str, np.ndarray[Any, Any] | Tensor]:
        return dict(zip(wanted, self._session.run(wanted, inputs), strict=True))

    def _zeros(self) -> Batch:
        inputs = {}
        for spec in self._signature.inputs:
            zeros = np.zeros(self._warm_up_shape(spec), dtype=spec.datatype.numpy_dtype)
            if spec.datatype is DataType.BYTES:
                zeros.fill(b"")
            inputs[spec.name] = tensor_from_numpy(spec.name, zeros, spec.datatype)
        return Batch(inputs, tuple(spec.name for spec in self._signature.outputs), (1,))

    def _warm_up_shape(self, spec: TensorSpec) -> tuple[int, ...]:
        """The model's shape, with what the configuration says of the dimensions that vary, else 1."""
        shape = spec.shape
        for declared in self._config.inputs:
            if declared.name == spec.name:
                dims = declared.dims if declared.reshape is None else declared.reshape
                shape = (1, *dims) if self._config.max_batch_size > 0 else dims
        return tuple(1 if dim == -1 else dim for dim in shape)


class Bfloat16Model(OnnxModel):
    """A session with BF16 inputs or outputs, which numpy arrays cannot name: they go as their uint16 bits."""

    def _run(
        self, wanted: tuple[str, ...], inputs: Mapping[str, np.ndarray[Any, Any]]
    ) -> Mapping[str, np.ndarray[Any, Any] | Tensor]:
        bfloat16 = {spec.name for spec in self._signature.inputs if spec.datatype is DataType.BF16}
        values = {
            name: onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, _ONNX_BFLOAT16)
            if name in bfloat16
            else onnxruntime.OrtValue.ortvalue_from_numpy(array)
            for name, array in inputs.items()
        }
        results = self._session.run_with_ort_values(wanted, values)
        return {name: _from_ort_value(name, result) for name, result in zip(wanted, results, strict=True)}


def _from_ort_value(name: str, value: Any) -> np.ndarray[Any, Any] | Tensor:
    if value.element_type() != _ONNX_BFLOAT16:
        return np.asarray(value.numpy())
    size = value.tensor_size_in_bytes()
    data = ctypes.string_at(value.data_ptr(), size) if size else b""
    return Tensor(name, DataType.BF16, tuple(value.shape()), data)


def _text_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """An array of text, which is what ONNX Runtime takes for BYTES.

    Raises:
        ServeError: INVALID_ARGUMENT; an element is not UTF-8, the only strings that ONNX Runtime takes from Python.
    """
    array = tensor.numpy()
    try:
        for index, element in enumerate(array.flat):
            array.flat[index] = element.decode()
    except UnicodeDecodeError as error:
        raise invalid_argument(f"element {index} of input '{tensor.name}' is not valid UTF-8: {error.reason}") from None
    return array
