"""What responders have in common that stand before another one."""

from __future__ import annotations

from collections.abc import Callable

from rocserve.core.errors import ServeError
from rocserve.core.requests import InferResponse
from rocserve.core.serving import Responder


class ForwardingResponder:
    """Hands all on to another responder. Implements core.serving.Responder."""

    __slots__ = ("_responder",)

    def __init__(self, responder: Responder) -> None:
        self._responder = responder

    def expect_many(self) -> None:
        """See core.serving.Responder."""
        self._responder.expect_many()

    def send(self, response: InferResponse, final: bool = True) -> None:
        """See core.serving.Responder."""
        self._responder.send(response, final)

    def end(self) -> None:
        """See core.serving.Responder."""
        self._responder.end()

    def fail(self, error: ServeError, final: bool = True) -> None:
        """See core.serving.Responder."""
        self._responder.fail(error, final)

    def watch_cancellation(self, callback: Callable[[], None]) -> None:
        """See core.serving.Responder."""
        self._responder.watch_cancellation(callback)


class EndingResponder(ForwardingResponder):
    """Hands all on as well, and does `on_end` once, before the last response goes out."""

    __slots__ = ("_on_end",)

    def __init__(self, responder: Responder, on_end: Callable[[], None]) -> None:
        super().__init__(responder)
        self._on_end: Callable[[], None] | None = on_end

    def send(self, response: InferResponse, final: bool = True) -> None:
        if final:
            self._end()
        self._responder.send(response, final)

    def end(self) -> None:
        self._end()
        self._responder.end()

    def fail(self, error: ServeError, final: bool = True) -> None:
        if final:
            self._end()
        self._responder.fail(error, final)

    def _end(self) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()
