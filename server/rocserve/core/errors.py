"""ServeError, the only exception that reaches clients, and its status codes."""

from __future__ import annotations

import enum
from functools import partial

from rocserve.core.printable import encodable


class StatusCode(enum.IntEnum):
    """gRPC's status codes, with the numbers of the gRPC specification."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class ServeError(Exception):
    """An error with the status code and the text for the client."""

    def __init__(self, code: StatusCode, text: str) -> None:
        text = encodable(text)
        super().__init__(text)
        self.code = code
        self.text = text
        self.is_refusal = False
        """Set in front end processes: the server refused the request before it was scheduled."""
        self.retry_seconds = 0.0
        """Seconds after which a retry makes sense; 0 = unknown."""

    def __repr__(self) -> str:
        return f"ServeError({self.code.name}, {self.text!r})"


invalid_argument = partial(ServeError, StatusCode.INVALID_ARGUMENT)
not_found = partial(ServeError, StatusCode.NOT_FOUND)
unavailable = partial(ServeError, StatusCode.UNAVAILABLE)
unimplemented = partial(ServeError, StatusCode.UNIMPLEMENTED)
internal = partial(ServeError, StatusCode.INTERNAL)


def copied_error(error: ServeError) -> ServeError:
    """Return a copy of an error. An exception that is raised again and again would collect its tracebacks."""
    return ServeError(error.code, error.text)


def deadline_exceeded() -> ServeError:
    """Return the error for a deadline that has passed, or will have passed before the answer is there."""
    return ServeError(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
