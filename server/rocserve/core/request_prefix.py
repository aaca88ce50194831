"""What begins a line of the log that is about requests, and which requests a model is working on: every line that it
writes meanwhile begins with their ids, and in a process of several models with its name."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar, Token

_UNKNOWN_ID = "<id_unknown>"

# A context's, not a thread's: a coroutine of a model goes on after others have begun.
_CURRENT: ContextVar[tuple[str, ...]] = ContextVar("current requests", default=())

_MODEL: ContextVar[str] = ContextVar("model", default="")


def request_prefix(ids: Sequence[str]) -> str:
    """Triton's `[request id: ...] `; of a batch with the ids of all its requests. "" is a request without an id."""
    return f"[request id: {', '.join(request_id or _UNKNOWN_ID for request_id in ids)}] "


def begin_model(prefix: str) -> None:
    """From now on, in this context, all is done for this model."""
    _MODEL.set(prefix)


def begin_requests(ids: tuple[str, ...]) -> Token[tuple[str, ...]]:
    """From now on, in this context, the model is at the requests of these ids ("" = one without)."""
    return _CURRENT.set(ids)


def end_requests(token: Token[tuple[str, ...]]) -> None:
    """What `begin_requests` gave; back to what was before."""
    _CURRENT.reset(token)


def current_prefix() -> str:
    """What stands before a line: the model where that has been said, and Triton's `[request id: ...] ` where a request
    has an id."""
    ids = _CURRENT.get()
    return _MODEL.get() + (request_prefix(ids) if any(ids) else "")
