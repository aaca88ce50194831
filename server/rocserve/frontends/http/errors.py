"""Errors as responses of HTTP."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.request_memory import MemoryFull
from rocserve.frontends.http.json_text import json_bytes
from rocserve.frontends.http.request import Response

JSON = "application/json"
PLAIN = "text/plain"
"""Triton calls the JSON of some of its errors so."""

_STATUSES: Mapping[StatusCode, int] = MappingProxyType(
    {
        StatusCode.INTERNAL: 500,
        StatusCode.NOT_FOUND: 404,
        StatusCode.UNAVAILABLE: 503,
        StatusCode.UNIMPLEMENTED: 501,
        StatusCode.DEADLINE_EXCEEDED: 504,
        StatusCode.RESOURCE_EXHAUSTED: 429,
        StatusCode.PERMISSION_DENIED: 403,
        StatusCode.UNAUTHENTICATED: 401,
    }
)


def status_of(error: ServeError) -> int:
    """The HTTP status of an error; 400 where no other says it better, as in Triton."""
    if isinstance(error, MemoryFull):
        # The server is full, not this client's share of it: balancers then ask another server, as of a full queue.
        return 413 if error.fits_never else 503
    return _STATUSES.get(error.code, 400)


class HttpError(Exception):
    """An error that only HTTP knows; without a text it has no body."""

    def __init__(
        self, status: int, text: str, content_type: str = PLAIN, headers: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.content_type = content_type
        self.headers = headers


def error_body(text: str) -> bytes:
    return json_bytes({"error": text})


def error_response(error: ServeError | HttpError, content_type: str = JSON) -> Response:
    """The response for an error.

    Args:
        content_type: of a ServeError; an HttpError has its own.
    """
    if isinstance(error, HttpError):
        return Response(error.status, error_body(error.text) if error.text else b"", error.content_type, error.headers)
    headers = {"Retry-After": str(math.ceil(error.retry_seconds))} if error.retry_seconds else {}
    return Response(status_of(error), error_body(error.text), content_type, headers)


def not_allowed(content_type: str = PLAIN) -> HttpError:
    return HttpError(405, "Method Not Allowed", content_type)


def not_found() -> HttpError:
    return HttpError(404, "Not Found")
