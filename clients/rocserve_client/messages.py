"""Inference requests and answers to and from the bytes of their messages.

They are ModelInferRequest, ModelInferResponse and ModelStreamInferResponse of KServe v2's gRPC service.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import TypedDict

from rocserve.protocol import grpc_service_pb2 as pb
from rocserve_client.errors import Internal, InvalidArgument, RocserveError
from rocserve_client.results import InferResult
from rocserve_client.tensors import Array, Input, Output, ParameterValue, decode_array, encode_array
from rocserve_client.wire import Buffer, join, split

_RAW_INPUT_CONTENTS = 7
_RAW_OUTPUT_CONTENTS = 6
_STREAM_INFER_RESPONSE = 2

Inputs = Mapping[str, Array | Input]
Outputs = Sequence[str | Output] | None


class RequestOptions(TypedDict, total=False):
    """What a request may say beside its model and tensors."""

    version: str
    """The model's version; empty: the highest that is ready."""
    request_id: str
    """Comes back in the answer and stands in the server's log."""
    priority: int
    """1 is the highest; 0: the model's default."""
    parameters: Mapping[str, ParameterValue]
    """Request parameters, e.g. "timeout" (microseconds in the server's queue) or "sequence_id"."""


def encode_infer_request(model: str, inputs: Inputs, outputs: Outputs, options: RequestOptions) -> bytes:
    """A ModelInferRequest; all tensors are in raw_input_contents.

    Raises:
        InvalidArgument: an input or a parameter that has no form on the wire.
    """
    head = pb.ModelInferRequest(
        model_name=model, model_version=options.get("version", ""), id=options.get("request_id", "")
    )
    _set_parameters(head.parameters, options.get("parameters", {}))
    if priority := options.get("priority", 0):
        head.parameters["priority"].uint64_param = priority
    contents: list[Buffer] = []
    for name, value in inputs.items():
        tensor = encode_array(name, value)
        entry = head.inputs.add(name=name, datatype=tensor.datatype.value, shape=tensor.shape)
        if isinstance(value, Input):
            _set_parameters(entry.parameters, value.parameters)
        contents.append(memoryview(tensor.data))
    for output in outputs or ():
        if isinstance(output, str):
            head.outputs.add(name=output)
        else:
            requested = head.outputs.add(name=output.name)
            if output.classification:
                requested.parameters["classification"].int64_param = output.classification
    return join(head.SerializeToString(), _RAW_INPUT_CONTENTS, contents)


def decode_infer_response(message: Buffer) -> InferResult:
    """The answer in a ModelInferResponse, its arrays being views on `message`.

    Raises:
        Internal: the message is none, or its tensors do not fit what it says of them.
    """
    try:
        head_bytes, contents = split(message, _RAW_OUTPUT_CONTENTS)
    except ValueError as error:
        raise Internal(f"the server's answer is no ModelInferResponse: {error}") from error
    head = pb.ModelInferResponse.FromString(head_bytes)
    if len(contents) != len(head.outputs):
        raise Internal(
            f"the server's answer has {len(head.outputs)} outputs but raw_output_contents for {len(contents)}"
        )
    return InferResult(
        model_name=head.model_name,
        model_version=head.model_version,
        request_id=head.id,
        parameters={name: _parameter_value(parameter) for name, parameter in head.parameters.items()},
        outputs={
            output.name: decode_array(output.name, output.datatype, tuple(output.shape), content)
            for output, content in zip(head.outputs, contents, strict=True)
        },
    )


def decode_stream_response(message: bytes) -> InferResult:
    """The answer in a ModelStreamInferResponse.

    Raises:
        RocserveError: the request failed, alone; the message carries a text instead of an answer.
    """
    head_bytes, responses = split(message, _STREAM_INFER_RESPONSE)
    response = responses[0] if responses else b""
    text = pb.ModelStreamInferResponse.FromString(head_bytes).error_message
    if text:
        head_bytes, _ = split(response, _RAW_OUTPUT_CONTENTS)
        failed = pb.ModelInferResponse.FromString(head_bytes)
        raise RocserveError(text, request_id=failed.id)
    return decode_infer_response(response)


def _set_parameters(target: MutableMapping[str, pb.InferParameter], parameters: Mapping[str, ParameterValue]) -> None:
    for name, value in parameters.items():
        _set_parameter(target[name], name, value)


def _set_parameter(parameter: pb.InferParameter, name: str, value: ParameterValue) -> None:
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int):
        # Sequence ids may need all 64 bits.
        field = "int64_param" if value < 1 << 63 else "uint64_param"
        setattr(parameter, field, value)
    elif isinstance(value, float):
        parameter.double_param = value
    elif isinstance(value, str):
        parameter.string_param = value
    else:
        raise InvalidArgument(f"parameter '{name}' is a {type(value).__name__}, expected bool, int, float or str")


def _parameter_value(parameter: pb.InferParameter) -> ParameterValue:
    value: ParameterValue = getattr(parameter, parameter.WhichOneof("parameter_choice") or "string_param")
    return value
