"""Encodes ModelInferRequest, and decodes ModelInferResponse and ModelStreamInferResponse of KServe v2's gRPC
service."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, TypedDict, TypeVar

from google.protobuf.message import DecodeError, Message

from rocserve.core.errors import ServeError
from rocserve.core.parameters import ParameterValue
from rocserve.core.wire_format import Buffer, WireError
from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.protocol.parameters import read_parameters, write_parameters
from rocserve_client.errors import Internal, InvalidArgument, RocserveError
from rocserve_client.results import InferResult
from rocserve_client.tensors import Array, Input, Output, decode_array, encode_array
from rocserve_client.wire import join, split

Head = TypeVar("Head", bound=Message)

_RAW_INPUT_CONTENTS = pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER
_RAW_OUTPUT_CONTENTS = pb.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER
_STREAM_INFER_RESPONSE = pb.ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER

OneInput = Array | Input | list[Any]
"""An input without a name, for a model with one input. Lists need `cast`."""
Inputs = Mapping[str, OneInput]
Outputs = Sequence[str | Output] | None


class RequestOptions(TypedDict, total=False):
    """The options of a request, in addition to its model and tensors."""

    version: str
    """The model's version; "" = the highest ready version."""
    request_id: str
    """Comes back in the answer, and in the texts of errors about the request."""
    priority: int
    """1 is the highest; 0 = the model's default."""
    parameters: Mapping[str, ParameterValue]
    """Request parameters, e.g. "timeout" (microseconds in the server's queue)."""
    mark_last: bool
    """In a stream: if a decoupled model ends a request without an answer, send an empty last answer, so that one answer
    to each request has `InferResult.is_last`."""


def encode_infer_request(model: str, inputs: Inputs, outputs: Outputs, options: RequestOptions) -> bytes:
    """Return a ModelInferRequest with all tensors in raw_input_contents. Raises InvalidArgument if an input, a
    parameter or a text cannot be encoded."""
    try:
        return _encoded(model, inputs, outputs, options)
    except ValueError as error:
        raise InvalidArgument(f"a value of the request has no form on the wire: {error}") from error


def _encoded(model: str, inputs: Inputs, outputs: Outputs, options: RequestOptions) -> bytes:
    head = pb.ModelInferRequest(
        model_name=model, model_version=options.get("version", ""), id=options.get("request_id", "")
    )
    _write(options.get("parameters", {}), head.parameters)
    if priority := options.get("priority", 0):
        head.parameters["priority"].uint64_param = priority
    if options.get("mark_last", False):
        head.parameters["triton_enable_empty_final_response"].bool_param = True
    contents: list[Buffer] = []
    for name, value in inputs.items():
        tensor = encode_array(name, value)
        entry = head.inputs.add(name=name, datatype=tensor.datatype.value, shape=tensor.shape)
        if isinstance(value, Input):
            _write(value.parameters, entry.parameters)
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
    """Return the answer in a ModelInferResponse; its arrays are views on `message`. Raises Internal if the message is
    faulty, or its tensors do not fit their shapes and datatypes."""
    head, contents = _take_apart(message, pb.ModelInferResponse, _RAW_OUTPUT_CONTENTS)
    if len(contents) != len(head.outputs):
        raise Internal(
            f"the server's answer has {len(head.outputs)} outputs but raw_output_contents for {len(contents)}"
        )
    return InferResult(
        model_name=head.model_name,
        model_version=head.model_version,
        request_id=head.id,
        parameters=_read(head.parameters),
        outputs={
            output.name: decode_array(output.name, output.datatype, tuple(output.shape), content)
            for output, content in zip(head.outputs, contents, strict=True)
        },
    )


def decode_stream_response(message: bytes) -> InferResult:
    """Return the answer in a ModelStreamInferResponse. Raises RocserveError if the request failed."""
    head, responses = _take_apart(message, pb.ModelStreamInferResponse, _STREAM_INFER_RESPONSE)
    response = responses[0] if responses else b""
    if head.error_message:
        failed, _ = _take_apart(response, pb.ModelInferResponse, _RAW_OUTPUT_CONTENTS)
        raise RocserveError(head.error_message, request_id=failed.id)
    return decode_infer_response(response)


def decode_message(message: bytes, kind: type[Head]) -> Head:
    """Parse a message. Raises Internal if it is not of this kind."""
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise _no(kind, error) from error


def _take_apart(message: Buffer, kind: type[Head], bulk_field: int) -> tuple[Head, list[memoryview]]:
    """Return the message without its bulk field, and the contents of that field."""
    try:
        head, contents = split(message, bulk_field)
    except WireError as error:
        raise _no(kind, error) from error
    return decode_message(head, kind), contents


def _no(kind: type[Message], error: Exception) -> Internal:
    return Internal(f"expected a {kind.DESCRIPTOR.name} from the server, got other bytes: {error}")


def _read(parameters: Mapping[str, pb.InferParameter]) -> Mapping[str, ParameterValue]:
    try:
        return read_parameters(parameters)
    except ServeError as error:
        raise Internal(f"the server's answer has a parameter without a value: {error.text}") from error


def _write(values: Mapping[str, ParameterValue], parameters: MutableMapping[str, pb.InferParameter]) -> None:
    try:
        write_parameters(values, parameters)
    except ServeError as error:
        raise InvalidArgument(error.text) from error
