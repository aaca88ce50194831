"""What a traced request carries along."""

from __future__ import annotations

from typing import Protocol


class Trace(Protocol):
    """One request's trace. Called from any thread; only requests that were chosen for tracing have one."""

    def stamp(self, activity: str, ns: int) -> None:
        """Something happened, e.g. QUEUE_START.

        Args:
            activity: Triton's name for it.
            ns: time.monotonic_ns() when it did.
        """

    def child(self, model_name: str, model_version: str) -> Trace:
        """The trace of a request that this one makes: a step of an ensemble."""
