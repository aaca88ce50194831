"""The end of a version: it takes no more, and tells when all that it took has been answered."""

from __future__ import annotations

from collections.abc import Callable


class Drain:
    """Not thread-safe: its owner calls it under its lock."""

    def __init__(self) -> None:
        self.running = 0
        """What was taken and is not answered yet; the owner counts it."""
        self.closed = False
        """Nothing more is to be taken."""
        self._on_drained: Callable[[], None] | None = None

    @property
    def awaited(self) -> bool:
        """Whether somebody waits to be told. It may be asked without the lock, to save a look that nobody waits for."""
        return self._on_drained is not None

    def close(self, on_drained: Callable[[], None]) -> None:
        """Take nothing more from now on; `on_drained` is to be called, once, when nothing is left."""
        self.closed = True
        self._on_drained = on_drained

    def finished(self) -> Callable[[], None] | None:
        """Whom to tell, without the lock, when nothing runs any more; None = nobody, or it is too early."""
        if self.running:
            return None
        on_drained, self._on_drained = self._on_drained, None
        return on_drained
