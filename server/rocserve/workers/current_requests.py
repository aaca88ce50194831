"""Which requests a model is working on: every line that it writes to the log meanwhile begins with their ids."""

from __future__ import annotations

from contextvars import ContextVar, Token

from rocserve.core.request_prefix import request_prefix

# A context's, not a thread's: a coroutine of a model goes on after others have begun.
_CURRENT: ContextVar[tuple[str, ...]] = ContextVar("current requests", default=())


def begin_requests(ids: tuple[str, ...]) -> Token[tuple[str, ...]]:
    """From now on, in this context, the model is at the requests of these ids ("" = one without)."""
    return _CURRENT.set(ids)


def end_requests(token: Token[tuple[str, ...]]) -> None:
    """What `begin_requests` gave; back to what was before."""
    _CURRENT.reset(token)


def current_prefix() -> str:
    """What stands before a line: Triton's `[request id: ...] `, or nothing where no request has an id."""
    ids = _CURRENT.get()
    return request_prefix(ids) if any(ids) else ""
