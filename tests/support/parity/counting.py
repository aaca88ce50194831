"""Counts what a run has compared, for the line at its end."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.triton_peer import TRITON_VERSION
from support.parity.differences import Difference


@dataclass(slots=True)
class Comparisons:
    """Counts distinct requests: the same request sent twice counts once."""

    recorded: bool
    """Whether Triton's answers are recorded ones."""
    requests: set[str] = field(default_factory=set)
    bad_requests: set[str] = field(default_factory=set)
    """Requests that Triton refused (or rocserve, if Triton is not asked)."""
    configurations: set[str] = field(default_factory=set)
    differences: list[Difference] = field(default_factory=list)
    """Known differences that were seen."""
    triton_failed_at: str = ""
    """The exchange in which a running Triton ended, or gave no answer in time."""
    late: list[str] = field(default_factory=list)
    """The exchanges for which a running Triton was late."""

    def count_difference(self, difference: Difference) -> None:
        if difference not in self.differences:
            self.differences.append(difference)

    def __str__(self) -> str:
        return (
            f"parity: {len(self.requests)} requests compared ({len(self.bad_requests)} of them bad),"
            f" {len(self.configurations)} configurations, {len(self.differences)} deliberate differences,"
            f" with {'recorded answers of' if self.recorded else 'a running'} Triton {TRITON_VERSION}{self._failed}"
        )

    @property
    def _failed(self) -> str:
        late = f", and with recorded answers where Triton was late: {', '.join(self.late)}" if self.late else ""
        if self.triton_failed_at:
            late += f", and with recorded answers since Triton failed at '{self.triton_failed_at}'"
        return late
