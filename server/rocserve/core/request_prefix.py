"""Builds the prefix of log lines: ids of the requests that a model works on, and in shared processes the model's
name."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar, Token

from rocserve.core.printable import printable

# Per context, not per thread: a model's coroutine may continue after other requests have begun.
_CURRENT: ContextVar[tuple[str, ...]] = ContextVar("current requests", default=())

_MODEL: ContextVar[str] = ContextVar("model", default="")


def request_prefix(ids: Sequence[str]) -> str:
    """Return Triton's `[request id: ...] ` for the requests of a batch; "" stands for a request without an id."""
    return f"[request id: {', '.join(request_id or '<id_unknown>' for request_id in ids)}] "


def begin_model(prefix: str) -> None:
    """Set the model that this context works for."""
    _MODEL.set(prefix)


def begin_requests(ids: tuple[str, ...]) -> Token[tuple[str, ...]]:
    """Set the ids of the requests that this context works on ("" = a request without an id)."""
    return _CURRENT.set(ids)


def end_requests(token: Token[tuple[str, ...]]) -> None:
    """Restore the ids from before `begin_requests`, which returned `token`."""
    _CURRENT.reset(token)


def current_prefix() -> str:
    """Return a log line's prefix: the model, if set, and Triton's `[request id: ...] `, if a request has an id. A
    client's id cannot begin a new line."""
    ids = _CURRENT.get()
    return _MODEL.get() + (request_prefix([printable(one) for one in ids]) if any(ids) else "")
