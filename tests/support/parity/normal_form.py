"""Messages as plain values, without what cannot be equal: durations and times become whether there is one."""

from __future__ import annotations

from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message
from tritonclient.grpc import service_pb2 as pb

from support.parity.exchange import GRPC_SERVICE

_RESPONSES: dict[str, type[Message]] = {
    f"{GRPC_SERVICE}{method.name}": getattr(pb, method.output_type.name)
    for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
}
_TIMES = frozenset({"ns", "last_inference", "total_ns"})


def unary_answer(path: str, data: bytes) -> Any:
    """The response of a method by its path. Bytes of a method that is not Triton's stay bytes."""
    response = _RESPONSES.get(path)
    return data if response is None else plain_message(response.FromString(data))


def stream_answer(data: bytes) -> Any:
    return plain_message(pb.ModelStreamInferResponse.FromString(data))


def plain_message(message: Message) -> Any:
    """Dictionaries and lists under the names of the .proto file; tensors as bytes."""
    if isinstance(message, pb.ModelInferResponse):
        plain = json_format.MessageToDict(message, preserving_proto_field_name=True)
        if message.raw_output_contents:
            plain["raw_output_contents"] = list(message.raw_output_contents)
        return plain
    if isinstance(message, pb.ModelStreamInferResponse):
        found: dict[str, Any] = {"infer_response": plain_message(message.infer_response)}
        if message.error_message:
            found["error_message"] = message.error_message
        return found
    return plain_values(json_format.MessageToDict(message, preserving_proto_field_name=True))


def plain_values(value: Any) -> Any:
    """JSON without times, and with the rows of an index in their order: Triton lists models in none."""
    if isinstance(value, dict):
        return {key: int(int(entry) > 0) if key in _TIMES else _ordered(key, entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [plain_values(entry) for entry in value]
    return value


def _ordered(key: str, value: Any) -> Any:
    plain = plain_values(value)
    return sorted(plain, key=repr) if key in ("models", "model_stats") else plain
