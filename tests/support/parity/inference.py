"""ModelInfer requests, valid and invalid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor

Parameters = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Input:
    """An input of the message. Its fields may contradict each other."""

    name: str
    datatype: str
    shape: Sequence[int]
    raw: bytes | None = None
    """Its entry in raw_input_contents; None: it has none."""
    contents: Mapping[str, Sequence[Any]] | None = None
    """The typed contents, by the names of the fields."""
    parameters: Parameters = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Output:
    name: str
    parameters: Parameters = field(default_factory=dict)


def raw_input(name: str, values: Any, dtype: str = "int32", **parameters: Any) -> Input:
    """An input with a numpy array; `object` becomes BYTES."""
    array = np.array(values, dtype=dtype)
    data = serialize_byte_tensor(array).item() if dtype == "object" and array.size else array.tobytes()
    return Input(name, np_to_triton_dtype(array.dtype), array.shape, data, parameters=parameters)


def infer(
    model: str,
    *inputs: Input,
    outputs: Sequence[Output | str] = (),
    version: str = "",
    request_id: str = "",
    parameters: Parameters | None = None,
    further_raw: Sequence[bytes] = (),
) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=model, model_version=version, id=request_id)
    fill_parameters(request.parameters, parameters or {})
    for entry in inputs:
        tensor = request.inputs.add(name=entry.name, datatype=entry.datatype, shape=entry.shape)
        fill_parameters(tensor.parameters, entry.parameters)
        for name, values in (entry.contents or {}).items():
            getattr(tensor.contents, name).extend(values)
        if entry.raw is not None:
            request.raw_input_contents.append(entry.raw)
    for output in outputs:
        wanted = Output(output) if isinstance(output, str) else output
        fill_parameters(request.outputs.add(name=wanted.name).parameters, wanted.parameters)
    request.raw_input_contents.extend(further_raw)
    return request


def fill_parameters(target: Any, values: Parameters) -> None:
    """Fill parameters: bool, int, float, bytes and str use the field of their type; None makes a parameter without a
    value."""
    for name, value in values.items():
        parameter = target[name]
        if isinstance(value, bool):
            parameter.bool_param = value
        elif isinstance(value, int):
            parameter.int64_param = value
        elif isinstance(value, float):
            parameter.double_param = value
        elif isinstance(value, bytes):
            parameter.bytes_param = value
        elif isinstance(value, str):
            parameter.string_param = value
        elif isinstance(value, pb.InferParameter):
            parameter.CopyFrom(value)
