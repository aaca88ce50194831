"""Tells what a job is at: to whoever waits for it, now and then; what its engine writes meanwhile, to the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

_FIRST_REPORT_SECONDS = 5.0
"""Within a phase. The next ones come more and more rarely, as each differs less from the one before."""
_RAREST_REPORT_SECONDS = 60.0
_REPORT_GROWTH = 1.5
_LONGEST_MESSAGE = 160
_START = "starting"
_MOST_LINES = 500
"""Of one job in the log."""


class JobWatch:
    """What one job is at. Made when it starts."""

    def __init__(
        self,
        title: str,
        report: Callable[[str], None],
        log: logging.Logger,
        engine: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.phase = _START
        self._title = title
        self._report = report
        self._log = log
        self._clock = clock
        self._engine = engine
        self._started = clock()
        self._pause = _FIRST_REPORT_SECONDS
        self._next_report = self._started + self._pause
        self._message = ""
        self._lines_left = _MOST_LINES

    @property
    def has_begun(self) -> bool:
        """The job is at a phase of its own."""
        return self.phase != _START

    @property
    def elapsed_seconds(self) -> float:
        return self._clock() - self._started

    def enters(self, phase: str) -> None:
        self.phase = phase
        self._message = ""
        self._pause = _FIRST_REPORT_SECONDS
        self._next_report = self._clock()
        self.tells()

    def takes_lines(self, lines: Sequence[str]) -> None:
        """What the engine wrote."""
        for line in lines:
            self._message = line.strip()
            self._lines_left -= 1
            if self._lines_left > 0:
                level = logging.WARNING if "[WARNING]" in line or "[ERROR]" in line else logging.INFO
                self._log.log(level, "%s: %s", self._title, line)
            elif self._lines_left == 0:
                self._log.warning("%s: writes very much; the rest is left out", self._title)

    def tells(self) -> None:
        """Report, where it is time again."""
        now = self._clock()
        if now < self._next_report:
            return
        self._next_report = now + self._pause
        self._pause = min(self._pause * _REPORT_GROWTH, _RAREST_REPORT_SECONDS)
        text = f"{self._title}: {self.phase}"
        if self.elapsed_seconds >= 1:
            text += f" ({_duration(self.elapsed_seconds)} so far)"
        if self._message:
            text += f"; {self._engine}: {self._message[:_LONGEST_MESSAGE]}"
        self._report(text)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
