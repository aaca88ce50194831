"""Parses clients' messages, and finds the fault in those that protobuf rejects without a reason."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.tensors import Buffer
from rocserve.core.wire_format import WireError, field_spans

_Kind = TypeVar("_Kind", bound=Message)


def parse_message(data: Buffer, kind: type[_Kind]) -> _Kind:
    """Parse a client's message. All bytes from clients are parsed here. Raises ServeError (INVALID_ARGUMENT)."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise _invalid(kind, describe_fault(data, kind)) from None


def invalid_field(kind: type[Message], name: str, start: int) -> ServeError:
    """Return the error for a field, at byte `start` of a message, with an invalid value."""
    return _invalid(kind, _field_fault(f"'{name}'", start))


def _invalid(kind: type[Message], fault: str) -> ServeError:
    return invalid_argument(f"the request is not a valid {kind.DESCRIPTOR.full_name}: {fault}")


def _field_fault(field: str, start: int) -> str:
    return f"field {field} at byte {start} has a value that is not valid"


def describe_fault(data: Buffer, message: type[Message]) -> str:
    """Return, as text for the client, why the bytes do not parse as `message`."""
    fields = message.DESCRIPTOR.fields_by_number
    try:
        for tag, start, _, end, _ in field_spans(data):
            try:
                message.FromString(data[start:end])
            except DecodeError:
                number = tag >> 3
                return _field_fault(f"'{fields[number].name}'" if number in fields else str(number), start)
    except WireError as error:
        return str(error)
    return "the fields do not form a message"
