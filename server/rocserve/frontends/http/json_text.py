"""Bytes to JSON values and back. Bytes that are no UTF-8 pass through both ways, as they do in Triton."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from rocserve.core.errors import ServeError, internal, invalid_argument
from rocserve.core.tensors import Buffer

DEEPEST_NESTING = 100

_BEGUN_VALUE = re.compile(r"n(ul?)?|t(ru?)?|f(a(ls?)?)?|-")
_BARE_FRACTION = re.compile(r"-?\d+\.")

_DECODER = json.JSONDecoder()
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_FAULTS = {
    "Expecting property name enclosed in double quotes": "Missing a name for object member.",
    "Illegal trailing comma before end of object": "Missing a name for object member.",
    "Expecting ':' delimiter": "Missing a colon after a name of object member.",
    "Extra data": "The document root must not be followed by other values.",
    "Unterminated string starting at": "Missing a closing quotation mark in string.",
    "Invalid \\escape": "Invalid escape character in string.",
    "Invalid control character at": "Invalid escape character in string.",
    "Invalid \\uXXXX escape": "Incorrect hex digit after \\u escape in string.",
}
"""What Python's parser finds, in the words of the one in Triton."""


def parse_json(data: Buffer) -> Any:
    """The value of a text in JSON. Raises: ServeError: INTERNAL, as Triton answers a text that is not JSON;
    INVALID_ARGUMENT when it is nested too deeply."""
    source = str(data, "utf-8", "surrogateescape")
    try:
        return _DECODER.decode(source)
    except json.JSONDecodeError as error:
        fault, position = _fault(source, error)
        offset = len(source[:position].encode("utf-8", "surrogateescape"))
        raise internal(f"failed to parse the request JSON buffer: {fault} at {offset}") from None
    except ValueError:
        # Python refuses to read integers of thousands of digits.
        raise internal("failed to parse the request JSON buffer: Number too big to be stored in double. at 0") from None
    except RecursionError:
        raise nested_too_deeply() from None


def json_bytes(value: Any) -> bytes:
    """The value as JSON without spaces."""
    source = _ENCODER.encode(value)
    try:
        return source.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        # Half of a pair of surrogates, which no encoding has.
        return source.encode("utf-8", "replace")


def nested_too_deeply() -> ServeError:
    return invalid_argument(f"JSON nesting depth exceeds maximum allowed limit ({DEEPEST_NESTING})")


def _fault(source: str, error: json.JSONDecodeError) -> tuple[str, int]:
    """The fault, and where it is."""
    position = error.pos
    if not source.strip(" \t\r\n"):
        return "The document is empty.", len(source)
    message = error.msg
    if message == "Unterminated string starting at":
        position = len(source)
    elif message.startswith("Expecting ',' delimiter"):
        number_start = len(source[:position].rstrip("-0123456789"))
        if _BARE_FRACTION.match(source, number_start) and source[position] == ".":
            return "Miss fraction part in number.", position + 1
        return f"Missing a comma or {_after_element(source[:position])}", position
    elif message.startswith("Illegal trailing comma before end of object"):
        position = source.index("}", position)
    elif message.startswith("Invalid \\uXXXX"):
        position = source.rindex("\\", 0, position + 1)
    elif message in ("Expecting value", "Illegal trailing comma before end of array"):
        if source[position : position + 1] == ",":
            # Some versions of Python name the comma before where the value should have stood.
            return "Invalid value.", len(source) - len(source[position + 1 :].lstrip(" \t\r\n"))
        word = _BEGUN_VALUE.match(source, position)
        return "Invalid value.", word.end() if word else position
    known = next((text for found, text in _FAULTS.items() if message.startswith(found)), "Invalid value.")
    return known, position


def _after_element(before: str) -> str:
    """What else may follow an element of what `before` leaves open."""
    open_brackets: list[str] = []
    for found in re.finditer(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', before):
        bracket = found[0]
        if bracket in "[{":
            open_brackets.append(bracket)
        elif bracket in "]}":
            open_brackets.pop()
    return "']' after an array element." if open_brackets[-1:] == ["["] else "'}' after an object member."


MISSING: Any = object()
"""In place of a member that is not there; null is None."""

UNSIGNED_LIMIT = 1 << 64


def find(value: Any, name: str) -> Any:
    """A member; MISSING where it is not there, or the value is no object."""
    return value.get(name, MISSING) if type(value) is dict else MISSING


def member(value: Any, name: str, where: str = "") -> Any:
    found = find(value, name)
    if found is MISSING:
        raise _wrong_kind(f"attempt to access non-existing object member '{name}'", where)
    return found


def text(value: Any, where: str = "") -> str:
    if type(value) is not str:
        raise _wrong_kind("attempt to access JSON non-string as string", where)
    return checked_text(value)


def checked_text(value: str) -> str:
    """The text, which can be written as UTF-8."""
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise internal("failed to parse the request JSON buffer: Invalid encoding in string. at 0") from None
    return value


def boolean(value: Any, where: str = "") -> bool:
    if type(value) is not bool:
        raise _wrong_kind("attempt to access JSON non-boolean as boolean", where)
    return value


def unsigned(value: Any, where: str = "") -> int:
    if type(value) is not int or not 0 <= value < UNSIGNED_LIMIT:
        raise _wrong_kind("attempt to access JSON non-unsigned-integer as unsigned-integer", where)
    return value


def array(value: Any, where: str = "") -> list[Any]:
    if type(value) is not list:
        raise _wrong_kind("attempt to access JSON non-array as array", where)
    return value


def json_object(value: Any, where: str = "") -> dict[str, Any]:
    if type(value) is not dict:
        raise _wrong_kind("attempt to access JSON non-object as object", where)
    return value


def members(value: Any, where: str = "") -> Mapping[str, Any]:
    if type(value) is not dict:
        raise _wrong_kind("attempt to get members for non-object", where)
    return value


def _wrong_kind(fault: str, where: str) -> ServeError:
    return internal(f"{where}: {fault}" if where else fault)
