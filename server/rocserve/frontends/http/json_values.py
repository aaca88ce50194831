"""Values of a request's JSON, each read as what it has to be; texts and codes are Triton's.

`where` says what was being read and stands before the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rocserve.core.errors import ServeError, internal

MISSING: Any = object()
"""In place of a member that is not there; null is None."""

UNSIGNED_LIMIT = 1 << 64


def find(value: Any, name: str) -> Any:
    """A member; MISSING where it is not there, or the value is no object."""
    return value.get(name, MISSING) if type(value) is dict else MISSING


def member(value: Any, name: str, where: str = "") -> Any:
    found = find(value, name)
    if found is MISSING:
        raise _fault(f"attempt to access non-existing object member '{name}'", where)
    return found


def text(value: Any, where: str = "") -> str:
    if type(value) is not str:
        raise _fault("attempt to access JSON non-string as string", where)
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
        raise _fault("attempt to access JSON non-boolean as boolean", where)
    return value


def unsigned(value: Any, where: str = "") -> int:
    if type(value) is not int or not 0 <= value < UNSIGNED_LIMIT:
        raise _fault("attempt to access JSON non-unsigned-integer as unsigned-integer", where)
    return value


def array(value: Any, where: str = "") -> list[Any]:
    if type(value) is not list:
        raise _fault("attempt to access JSON non-array as array", where)
    return value


def json_object(value: Any, where: str = "") -> dict[str, Any]:
    if type(value) is not dict:
        raise _fault("attempt to access JSON non-object as object", where)
    return value


def members(value: Any, where: str = "") -> Mapping[str, Any]:
    if type(value) is not dict:
        raise _fault("attempt to get members for non-object", where)
    return value


def _fault(fault: str, where: str) -> ServeError:
    return internal(f"{where}: {fault}" if where else fault)
