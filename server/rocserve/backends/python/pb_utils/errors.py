"""Defines the errors that models make and raise, and their codes in gRPC."""

from __future__ import annotations

import enum

from rocserve.core.errors import ServeError, StatusCode


def as_text(value: str | bytes, what: str) -> str:
    """`what`: for errors. Raises TypeError if the value is neither str nor bytes, UnicodeDecodeError if not UTF-8."""
    if isinstance(value, bytes):
        return value.decode()
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a str, got {type(value).__name__}")
    return value


class TritonModelException(Exception):
    """Raised if the interface is used wrongly; models raise it too."""


class ErrorCode(int, enum.Enum):
    """Triton's error codes, by TRITONSERVER_Error_Code. Not an IntEnum, which would print numbers."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7


_STATUS = {
    code: StatusCode[{"INVALID_ARG": "INVALID_ARGUMENT", "UNSUPPORTED": "UNIMPLEMENTED"}.get(code.name, code.name)]
    for code in ErrorCode
}
_CODES = {status: code for code, status in _STATUS.items()} | {
    # Triton has no codes for these; it reports expired and refused requests as UNAVAILABLE.
    StatusCode.DEADLINE_EXCEEDED: ErrorCode.UNAVAILABLE,
    StatusCode.RESOURCE_EXHAUSTED: ErrorCode.UNAVAILABLE,
}


class TritonError:
    """An error for one request, from a model or from another model that it called."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = ErrorCode

    def __init__(self, message: str | bytes, code: ErrorCode = ErrorCode.INTERNAL) -> None:
        self._message = as_text(message, "the message of a TritonError")
        self._code = ErrorCode(code)

    def message(self) -> str:
        return self._message

    def code(self) -> ErrorCode:
        return self._code


def to_serve_error(error: TritonError) -> ServeError:
    return ServeError(_STATUS[error.code()], error.message())


def from_serve_error(error: ServeError) -> TritonError:
    return TritonError(error.text, _CODES.get(error.code, ErrorCode.INTERNAL))
