"""The subject of a line of the log, apart from its text: fields of `--log-format=json` (docs/reference/logging.md)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

_ATTRIBUTE = "rocserve_fields"
"""A record's attribute with the fields."""


def about(
    *,
    model: str | None = None,
    version: int | str | None = None,
    request_id: str | None = None,
    client: str | None = None,
    code: str | None = None,
    duration_ms: float | None = None,
    responses: int | None = None,
    worker: int | None = None,
    front_end: int | None = None,
) -> Mapping[str, Any]:
    """Return the argument `extra` of a call that logs. None and "" = the line has no such field. `code`: the name of a
    gRPC status. `worker`: the id of the process that wrote the line; `front_end`: the number of the one that did."""
    values = {
        "model": model,
        "version": None if version is None else str(version),
        "request_id": request_id,
        "client": client,
        "code": code,
        "duration_ms": None if duration_ms is None else round(duration_ms, 3),
        "responses": responses,
        "worker": worker,
        "front_end": front_end,
    }
    return {_ATTRIBUTE: {name: value for name, value in values.items() if value not in (None, "")}}


def fields_of(record: logging.LogRecord) -> Mapping[str, Any]:
    found: Mapping[str, Any] = getattr(record, _ATTRIBUTE, {})
    return found
