"""Converts messages to plain values for JSON, in Triton's style. Field names are those of the .proto. Unset fields have
their defaults, except messages. 64-bit integers are numbers; in protobuf's own JSON they are strings."""

from __future__ import annotations

import base64
from collections.abc import MutableSequence
from typing import Any

from google.protobuf.message import Message


def plain_values(message: Message) -> dict[str, Any]:
    field: Any  # protobuf has several classes for a field.
    entries: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            element = field.message_type.fields_by_name["value"]
            entries[field.name] = {str(key): _value(element, value[key]) for key in sorted(value)}
        elif isinstance(value, MutableSequence):
            entries[field.name] = [_value(field, element) for element in value]
        elif not field.has_presence or _is_optional(field) or message.HasField(field.name):
            entries[field.name] = _value(field, value)
    return entries


def _is_optional(field: Any) -> bool:
    """Return whether a single value is declared as optional: protoc makes a separate oneof for each such field."""
    choice = field.containing_oneof
    return field.message_type is None and choice is not None and choice.name == f"_{field.name}"


def _value(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return plain_values(value)
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value
