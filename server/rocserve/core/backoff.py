"""Backoff says how long to wait before another attempt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Doubles the pauses between failures in a row, from `first_seconds` up to `longest_seconds`."""

    first_seconds: float
    longest_seconds: float

    def pause_seconds(self, failures: int) -> float:
        """Return the pause after so many failures; 0 = none yet, and no pause."""
        return min(self.first_seconds * 2.0 ** min(failures - 1, 60), self.longest_seconds) if failures > 0 else 0.0
