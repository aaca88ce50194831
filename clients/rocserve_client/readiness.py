"""Waits until a server or a model is ready, and says why it is not."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rocserve_client.calls import UnaryCall, model_ready, server_ready
from rocserve_client.errors import DeadlineExceeded, RocserveError, Unavailable
from rocserve_client.results import IndexEntry

PROBE_S = 2.0
"""The longest time for one probe."""

_PAUSES_S = (0.05, 0.5)
"""The shortest and the longest pause between two probes: a model may load for minutes."""
_PAUSE_SHARE = 0.05
"""A pause is this share of the time that has passed."""


class ReadinessWait:
    """The state of one wait. The clients probe and sleep."""

    def __init__(self, timeout: float, model: str | None) -> None:
        self._begin = time.monotonic()
        self._end = self._begin + timeout
        self._timeout = timeout
        self._subject = "the server" if model is None else f"model '{model}'"
        self._model = model
        self._reason = ""

    @property
    def probe_timeout(self) -> float:
        """Seconds for the next probe; at least 0.1, so that a reachable server can answer."""
        return max(0.1, min(PROBE_S, self._end - time.monotonic()))

    @property
    def pause(self) -> float:
        """Seconds until the next probe."""
        now = time.monotonic()
        shortest, longest = _PAUSES_S
        return max(0.0, min(max(shortest, _PAUSE_SHARE * (now - self._begin)), longest, self._end - now))

    def probe(self) -> UnaryCall[bool]:
        return server_ready() if self._model is None else model_ready(self._model, "")

    def note_unready(self, index: Sequence[IndexEntry]) -> None:
        """Note the reason: the states of the model, or of all models, in the repository index of the server."""
        rows = [entry for entry in index if self._model in (None, entry.name)]
        if self._model is not None and not rows:
            self._reason = "there is no such model in the repository"
            return
        # Models that nobody has asked for need not be loaded for the server to be ready.
        states = [_told(row) for row in rows if row.state != "READY" and (row.state or self._model is not None)]
        self._reason = "; ".join(states) if states else "the repository index does not tell why"

    def note_failure(self, error: RocserveError) -> None:
        """Note the error as the reason if the server may still come up; otherwise raise it, because it is final."""
        if not isinstance(error, Unavailable | DeadlineExceeded):
            raise error
        # The last probe is cut short by the end of the wait, and tells less than an earlier answer of the server.
        if not (isinstance(error, DeadlineExceeded) and self._reason and self._is_over):
            self._reason = error.text

    def check_time(self) -> None:
        if self._is_over:
            raise DeadlineExceeded(f"{self._subject} is not ready after {self._timeout:g} s: {self._reason}")

    @property
    def _is_over(self) -> bool:
        return time.monotonic() >= self._end


def _told(row: IndexEntry) -> str:
    if not row.state:
        return f"{row.name} is not loaded"
    return f"{row.name} version {row.version} is {row.state}: {row.reason}".rstrip(": ")
