"""What the parts of a request took together: the steps of an ensemble, each in its member."""

from __future__ import annotations


class PhaseTotals:
    """Sums of nanoseconds."""

    __slots__ = ("compute_infer", "compute_input", "compute_output")

    def __init__(self) -> None:
        self.compute_input = 0
        self.compute_infer = 0
        self.compute_output = 0

    def add_run(self, times: tuple[int, int, int, int]) -> None:
        """One execution: when it began, the engine began, the engine ended, the outputs were there."""
        begin, input_end, output_start, end = times
        self._add(input_end - begin, output_start - input_end, end - output_start)

    def add_all(self, others: PhaseTotals) -> None:
        """All of an ensemble that is a member of another one."""
        self._add(others.compute_input, others.compute_infer, others.compute_output)

    def _add(self, compute_input: int, compute_infer: int, compute_output: int) -> None:
        self.compute_input += compute_input
        self.compute_infer += compute_infer
        self.compute_output += compute_output
