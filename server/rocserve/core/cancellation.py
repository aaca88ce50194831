"""Cancellation by those who wait for answers: clients, and the other ends of links."""

from __future__ import annotations

from collections.abc import Callable


class Cancellable:
    """Calls back, at most once, when nobody waits for further answers. The base class of Responders."""

    is_cancelled = False
    """Nobody waits for further answers."""
    on_cancel: Callable[[], None] | None = None
    """Reset at the end: it refers to the request, which refers to this object, and the cycle would keep the client's
    data until the next garbage collection."""

    def watch_cancellation(self, callback: Callable[[], None]) -> None:
        """See core.exchange.Responder. The callback replaces an earlier one."""
        if self.is_cancelled:
            callback()
        else:
            self.on_cancel = callback

    def cancel(self) -> None:
        self.is_cancelled = True
        on_cancel, self.on_cancel = self.on_cancel, None
        if on_cancel is not None:
            on_cancel()
