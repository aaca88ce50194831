"""Writes a program as ONNX for MIGraphX and ONNX Runtime.

A quantised program gets pairs of QuantizeLinear and DequantizeLinear; a dynamically quantised one also gets
MatMulInteger.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import torch
from onnxscript import opset18 as op
from torch.export import ExportedProgram

from rocserve.backends.pytorch.program import remove_non_tensor_results

_ASPECT, _DEFAULT_ASPECT = "keep_aspect_ratio_policy", "stretch"
"""An attribute of Resize that MIGraphX refuses, also with its default, which PyTorch writes for each fixed size."""
_HALF = 128
"""The offset between int8 and uint8. MIGraphX computes only in int8, and misreads uint8 as int8 in a MatMulInteger."""


def write_onnx(program: ExportedProgram, path: Path, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Write the program to `path`. `inputs` and `outputs` are the tensors' names in the file."""
    remove_non_tensor_results(program)
    written = torch.onnx.export(
        program,
        input_names=inputs,
        output_names=outputs,
        custom_translation_table=_translations(),
        opset_version=18,  # The newest whose QuantizeLinear, as written here, MIGraphX reads.
        dynamo=True,
        verbose=False,
    )
    for node in written.model.graph:
        aspect = node.attributes.get(_ASPECT)
        if node.op_type == "Resize" and aspect is not None and aspect.as_string() == _DEFAULT_ASPECT:
            node.attributes.pop(_ASPECT)
    written.save(path, external_data=False)


def _translations() -> Mapping[Callable[..., Any], Callable[..., Any]]:
    """Return translations of operators that PyTorch's exporter lacks, or writes in uint8."""
    quantised = torch.ops.quantized_decomposed
    return {
        torch.ops.aten._int_mm.default: _matmul,
        quantised.quantize_per_tensor.default: _quantise,
        quantised.dequantize_per_tensor.default: _dequantise,
        quantised.dequantize_per_channel.default: _dequantise_channels,
    }


def _matmul(left: Any, right: Any) -> Any:
    if left.dtype != onnx_ir.DataType.UINT8:
        return op.MatMulInteger(left, right)
    half = _constant(_HALF, np.int32)
    lowered = op.Cast(op.Sub(op.Cast(left, to=onnx_ir.DataType.INT32), half), to=onnx_ir.DataType.INT8)
    columns = op.ReduceSum(op.Cast(right, to=onnx_ir.DataType.INT32), _constant([0], np.int64), keepdims=1)
    return op.Add(op.MatMulInteger(lowered, right), op.Mul(columns, half))


def _quantise(source: Any, scale: float, zero_point: int, least: int, most: int, dtype: int) -> Any:
    return op.QuantizeLinear(source, _constant(scale, np.float32), _zero_point(zero_point, least))


def _dequantise(
    source: Any, scale: float, zero_point: int, least: int, most: int, dtype: int, out_dtype: int = -1
) -> Any:
    return op.DequantizeLinear(source, _constant(scale, np.float32), _zero_point(zero_point, least))


def _dequantise_channels(
    source: Any, scales: Any, zero_points: Any, axis: int, least: int, most: int, dtype: int, out_dtype: int = -1
) -> Any:
    return op.DequantizeLinear(source, scales, op.Cast(zero_points, to=onnx_ir.DataType.INT8), axis=axis)


def _zero_point(zero_point: int, least: int) -> Any:
    """Convert a zero point to int8. `least`, the least quantised value, tells int8 from uint8."""
    return _constant(zero_point - least - _HALF, np.int8)


def _constant(value: Any, dtype: Any) -> Any:
    return op.Constant(value=onnx_ir.tensor(np.array(value, dtype)))
