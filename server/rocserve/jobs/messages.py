"""The order to a job's child process, and its replies. The child reads a JobOrder from standard input and writes
JobReplies to a pipe, one line of JSON each. The last reply has the result or the failure, unless the child crashed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rocserve.core.errors import ServeError, StatusCode

Report = Callable[[str], None]
"""Takes the phase of a job, worded to follow "while": "reading the model", "compiling"."""


class Job(Protocol):
    """A frozen dataclass whose `perform(report)` does the work in the child process and returns a dataclass, or None if
    its result is files. A MIGraphX job's `perform` also gets the binding. Job and result travel as JSON
    (core/plain.py)."""

    @property
    def title(self) -> str:
        """Return the job's name for people: "compiling batch size 4 of model 'x'"."""


class JobError(ServeError):
    """A failed job; the text names the job."""

    def __init__(self, code: StatusCode, text: str, is_crash: bool = False) -> None:
        """`is_crash`: the child died in the middle of its work, because the engine cannot do this job."""
        super().__init__(code, text)
        self.is_crash = is_crash


@dataclass(frozen=True, slots=True)
class JobOrder:
    """A job for a child process."""

    context: str
    job: str
    """The job as JSON."""
    low_priority: bool


@dataclass(frozen=True, slots=True)
class JobReply:
    """A reply has one of `phase`, `result` and `failure`."""

    phase: str | None = None
    result: str | None = None
    """The result as JSON."""
    failure: str | None = None
    code: int = 0
    """The failure's StatusCode."""
    can_pass: bool = True
    """ServeError.can_pass of the failure."""
