"""ServeError, the only exception that reaches clients, and its status codes."""

from __future__ import annotations

import enum
from functools import partial
from typing import Self

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


def status_code(number: int) -> StatusCode:
    """Return the status code that another process has sent; INTERNAL if it does not exist."""
    try:
        return StatusCode(number)
    except ValueError:
        return StatusCode.INTERNAL


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
        self.is_overload = False
        """Too many requests wait: the same request may succeed when others have been answered."""
        self.can_pass = code not in (StatusCode.INVALID_ARGUMENT, StatusCode.UNIMPLEMENTED)
        """Whether a failed load may succeed later with the same files. The status decides, unless the place that raises
        the error calls `passing` or `lasting`."""

        self.trace = ""
        """Of a failed load: the traceback in the model's own code; "" = the text is enough."""

    def forget_frames(self) -> None:
        """Drop the frames in which the error was raised. A frame that has the error as a value, too, is a cycle with
        it, and would keep a request's memory until a garbage collection, which an idle process never makes."""
        self.__traceback__ = self.__context__ = self.__cause__ = None

    def passing(self) -> Self:
        self.can_pass = True
        return self

    def lasting(self) -> Self:
        self.can_pass = False
        return self

    def with_text(self, text: str) -> ServeError:
        """Return the same error with another text."""
        error = ServeError(self.code, text)
        error.can_pass, error.trace = self.can_pass, self.trace
        error.is_refusal, error.retry_seconds, error.is_overload = self.is_refusal, self.retry_seconds, self.is_overload
        return error

    def __repr__(self) -> str:
        return f"ServeError({self.code.name}, {self.text!r})"


invalid_argument = partial(ServeError, StatusCode.INVALID_ARGUMENT)
not_found = partial(ServeError, StatusCode.NOT_FOUND)
unavailable = partial(ServeError, StatusCode.UNAVAILABLE)
unimplemented = partial(ServeError, StatusCode.UNIMPLEMENTED)
internal = partial(ServeError, StatusCode.INTERNAL)


def unreadable(text: str, error: OSError) -> ServeError:
    """Return the error for a file that cannot be read. A missing file stays missing until its folder changes; errors of
    a disk, a network or permissions may pass."""
    failure = invalid_argument(text)
    is_absent = isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
    return failure if is_absent else failure.passing()


def copied_error(error: ServeError) -> ServeError:
    """Return a copy of an error. An exception that is raised again and again would collect its tracebacks."""
    return error.with_text(error.text)


def deadline_exceeded() -> ServeError:
    """Return the error for a deadline that has passed, or will pass before the answer is known."""
    return ServeError(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
