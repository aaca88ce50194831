"""What begins a line of the log that is about requests."""

from __future__ import annotations

from collections.abc import Sequence

_UNKNOWN_ID = "<id_unknown>"


def request_prefix(ids: Sequence[str]) -> str:
    """Triton's `[request id: ...] `; of a batch with the ids of all its requests. "" is a request without an id."""
    return f"[request id: {', '.join(request_id or _UNKNOWN_ID for request_id in ids)}] "
