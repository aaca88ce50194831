"""Whether the server may be sent requests, and whether it is ending."""

from __future__ import annotations

from collections.abc import Callable


class Readiness:
    """Read from any thread; `begin_exit` is called on the loop."""

    def __init__(self, is_repository_ready: Callable[[], bool]) -> None:
        self._is_repository_ready = is_repository_ready
        self.is_exiting = False

    def is_ready(self) -> bool:
        return not self.is_exiting and self._is_repository_ready()

    def begin_exit(self) -> None:
        """Not ready from now on, nor are the models."""
        self.is_exiting = True
