"""Defines the exceptions for failed calls: one class for each status that callers tell apart."""

from __future__ import annotations

from typing import Any, ClassVar

from rocserve.core.errors import StatusCode


class RocserveError(Exception):
    """A call that failed.

    Attributes:
        status: gRPC's status code; UNKNOWN for an error inside a stream, because a stream carries only the text.
        text: the text of the server, or of gRPC.
        request_id: for an error inside a stream, the id of the failed request, if the server sends it.
    """

    default_status: ClassVar[StatusCode] = StatusCode.UNKNOWN

    def __init__(self, text: str, status: StatusCode | None = None, request_id: str = "") -> None:
        super().__init__(text)
        self.text = text
        self.status = self.default_status if status is None else status
        self.request_id = request_id

    def __str__(self) -> str:
        return f"{self.status.name}: {self.text}"


class Cancelled(RocserveError):
    default_status = StatusCode.CANCELLED


class InvalidArgument(RocserveError):
    default_status = StatusCode.INVALID_ARGUMENT


class DeadlineExceeded(RocserveError):
    default_status = StatusCode.DEADLINE_EXCEEDED


class NotFound(RocserveError):
    default_status = StatusCode.NOT_FOUND


class AlreadyExists(RocserveError):
    default_status = StatusCode.ALREADY_EXISTS


class PermissionDenied(RocserveError):
    default_status = StatusCode.PERMISSION_DENIED


class ResourceExhausted(RocserveError):
    default_status = StatusCode.RESOURCE_EXHAUSTED


class Unimplemented(RocserveError):
    default_status = StatusCode.UNIMPLEMENTED


class Internal(RocserveError):
    default_status = StatusCode.INTERNAL


class Unavailable(RocserveError):
    default_status = StatusCode.UNAVAILABLE


class Unauthenticated(RocserveError):
    default_status = StatusCode.UNAUTHENTICATED


CLOSED = "the client or the stream was closed"
CLOSED_FOR_REQUESTS = "the stream is closed for further requests"
"""The text for a request after the end of sending."""
_SIGNS_OF_HTTP = ("Failed parsing HTTP/2", "http1.x server")
"""Parts of gRPC's text if the server speaks HTTP/1."""
_HTTP_PORT = "; this looks like an HTTP port: give the server's gRPC port (8001 by default)"
_CLASSES = {error.default_status: error for error in RocserveError.__subclasses__()}


def error_with(status: StatusCode, text: str) -> RocserveError:
    """Return the exception for a status; a RocserveError if the status has no class."""
    return _CLASSES.get(status, RocserveError)(text, status)


def error_from_grpc(error: Any) -> RocserveError:
    """Return the exception for a grpc.RpcError of the blocking or the asyncio interface."""
    text = error.details() or ""
    hint = _HTTP_PORT if any(sign in text for sign in _SIGNS_OF_HTTP) else ""
    return error_with(StatusCode(error.code().value[0]), text + hint)
