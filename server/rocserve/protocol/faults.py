"""Parses clients' messages, and describes the fault of those that protobuf refuses without a word."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from rocserve.core.errors import invalid_argument
from rocserve.core.tensors import Buffer
from rocserve.core.wire_format import WireError, field_spans

_Kind = TypeVar("_Kind", bound=Message)


def parse_message(data: Buffer, kind: type[_Kind]) -> _Kind:
    """A client's bytes as the message that they shall be. Whatever a client sends is parsed here. Raises: ServeError:
    INVALID_ARGUMENT, they are none."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise invalid_argument(
            f"the request is not a valid {kind.DESCRIPTOR.full_name}: {describe_fault(data, kind)}"
        ) from None


def describe_fault(data: Buffer, message: type[Message]) -> str:
    """The fault of bytes that do not parse as `message`, for the client to read."""
    fields = message.DESCRIPTOR.fields_by_number
    try:
        for span in field_spans(data):
            try:
                message.FromString(data[span.start : span.end])
            except DecodeError:
                name = f"'{fields[span.number].name}'" if span.number in fields else str(span.number)
                return f"field {name} at byte {span.start} has a value that is not valid"
    except WireError as error:
        return str(error)
    return "the fields do not form a message"
