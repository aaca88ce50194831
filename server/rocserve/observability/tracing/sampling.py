"""Which requests are traced: one setting's values, and how far it has counted."""

from __future__ import annotations

import threading
from dataclasses import replace

from rocserve.observability.tracing.options import TraceLevel, TraceValues


class TraceSetting:
    """What holds for one model, or for all without a setting of their own, until it is replaced by another."""

    def __init__(self, values: TraceValues, specified: frozenset[str] = frozenset(), fault: str = "") -> None:
        """
        Args:
            specified: the fields of `values` that were asked for; the others are those of the setting above.
            fault: why nothing can be traced by it; empty: something can.
        """
        self._values = values
        self.specified = specified
        self.fault = fault
        self._lock = threading.Lock()
        self._seen = 0
        self._remaining = values.count
        self._begun = 0

    @property
    def is_on(self) -> bool:
        """Whether a request may be traced by it."""
        return self._values.level is not TraceLevel.OFF

    @property
    def values(self) -> TraceValues:
        """As they are now: `count` is what is left."""
        return replace(self._values, count=self._remaining)

    @property
    def level(self) -> TraceLevel:
        return self._values.level

    @property
    def log_frequency(self) -> int:
        return self._values.log_frequency

    @property
    def is_counted(self) -> bool:
        """Whether it ends by itself."""
        return self._values.count > 0

    def has_all(self, collected: int) -> bool:
        """Whether so many finished traces are all that there will be."""
        with self._lock:
            return self._remaining == 0 and collected >= self._begun

    def choose(self, forced: bool = False) -> bool:
        """Whether the request that has come now is traced.

        Args:
            forced: its client traces it already, so that neither rate nor count matter.
        """
        with self._lock:
            chosen = False
            if self._values.rate:
                if (self.fault or not self._remaining) and not forced:
                    return False
                self._seen += 1
                chosen = self._seen % self._values.rate == 0 and self._remaining != 0
                if chosen and self._remaining > 0:
                    self._remaining -= 1
            chosen = chosen or forced
            self._begun += chosen
            return chosen
