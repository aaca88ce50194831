"""Says what is wrong with a message that protobuf refuses without a word."""

from __future__ import annotations

from google.protobuf.message import DecodeError, Message

from rocserve.core.wire_format import WireError, field_spans


def describe_fault(data: bytes, message: type[Message]) -> str:
    """What is wrong with bytes that do not parse as `message`, for the client to read."""
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
