"""The end of a version: it takes no more, and tells when all that it took has been answered."""

from __future__ import annotations

from collections.abc import Callable


class Drain:
    """Counts what was taken and is not answered yet; its owner says when there may be nothing left."""

    def __init__(self) -> None:
        self.running = 0
        self.is_awaited = False
        """Somebody waits to be told."""
        self._on_drained: Callable[[], None] | None = None

    def close(self, on_drained: Callable[[], None]) -> None:
        """`on_drained` is to be called, once, when nothing is left."""
        self._on_drained = on_drained
        self.is_awaited = True

    def report(self) -> bool:
        """Tell whoever waits, where nothing runs any more; whether that was done."""
        if self.running or self._on_drained is None:
            return False
        on_drained, self._on_drained = self._on_drained, None
        self.is_awaited = False
        on_drained()
        return True
