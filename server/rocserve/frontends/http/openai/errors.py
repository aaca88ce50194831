"""Errors in the form of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.request_memory import MemoryFull
from rocserve.frontends.http.json_text import json_bytes
from rocserve.frontends.http.request import JSON, HttpError, Response, error_response


class FieldFault(ServeError):
    """A fault of one member of a request's body."""

    def __init__(
        self, member: str, text: str, code: StatusCode = StatusCode.INVALID_ARGUMENT, kind: str | None = None
    ) -> None:
        """`member`: "" = the body as a whole. `kind`: OpenAI's name of the fault, such as "model_not_found"."""
        super().__init__(code, text)
        self.member = member
        self.kind = kind


def openai_error(error: ServeError | HttpError, members: Mapping[str, Any] | None = None) -> Response:
    """Return an error's answer in OpenAI's form, with the status that OpenAI's clients know: they send a request again
    after 408, 409, 429 and statuses from 500 on. `members`: further members of the body."""
    given = error_response(error)
    status, headers = given.status, dict(given.headers)
    member = kind = None
    text = error.text
    if isinstance(error, FieldFault):
        member, kind = error.member or None, error.kind
    elif isinstance(error, HttpError) and status == 403:
        # The secret of a restricted API is missing or wrong. OpenAI's clients know a wrong key by 401.
        status, kind = 401, "invalid_api_key"
        text += " or its value in 'Authorization: Bearer VALUE'"
        headers["WWW-Authenticate"] = "Bearer"
    elif isinstance(error, ServeError):
        if error.is_overload:
            status = 429
        if status == 429 and not isinstance(error, MemoryFull):
            kind = "rate_limit_exceeded"
    fault = {"message": text, "type": _type(status), "param": member, "code": kind}
    return Response(status, json_bytes({"error": fault, **(members or {})}), JSON, headers)


def _type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"
