"""What the servers count."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from support.parity.exchange import Asked, Call, Outcome

_SETTLE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Counters:
    """A model's statistics: the counts of its answers, and for each duration whether it is above zero."""

    model: str

    def digest(self) -> str:
        return self._call.digest()

    def ask(self, server: Asked) -> Outcome:
        # Triton counts a batch after it has answered the batch's requests.
        outcome, before = self._rows(server), None
        while outcome != before:
            time.sleep(_SETTLE_SECONDS)
            outcome, before = self._rows(server), outcome
        return outcome

    def _rows(self, server: Asked) -> Outcome:
        outcome = self._call.ask(server)
        rows = (outcome.answer or {}).get("model_stats", [])
        return replace(outcome, answer=[_without_memory(row) for row in rows])

    @property
    def _call(self) -> Call:
        return Call("ModelStatistics", pb.ModelStatisticsRequest(name=self.model))


def _without_memory(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "memory_usage"}
