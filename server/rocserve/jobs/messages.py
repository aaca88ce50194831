"""The order to a job's child process, and its replies.

It reads a JobOrder from its standard input and writes JobReply after JobReply, a line of JSON each, to a pipe. The last
one holds the result or the failure; a child that ends without it has crashed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rocserve.core.errors import ServeError, StatusCode

Report = Callable[[str], None]
"""Takes the phase that a job is at, as it goes on after "while": "reading the model", "compiling"."""


class Job(Protocol):
    """A frozen dataclass of the work, which its `perform(report)` does in the child; one of MIGraphX's is given its
    binding before. `perform` returns a dataclass. Both travel as JSON (core/plain.py).
    """

    @property
    def title(self) -> str:
        """What is done, for people: "compiling batch size 4 of model 'x'"."""


class JobError(ServeError):
    """A job that failed; the text names the job."""

    def __init__(self, code: StatusCode, text: str, is_crash: bool = False) -> None:
        """`is_crash`: the child ended by itself in the middle of its work: the engine does not survive this."""
        super().__init__(code, text)
        self.is_crash = is_crash


@dataclass(frozen=True, slots=True)
class JobOrder:
    context: str
    """JobEngine's."""
    job: str
    """As JSON."""
    low_priority: bool


@dataclass(frozen=True, slots=True)
class JobReply:
    """One of the three."""

    phase: str | None = None
    result: str | None = None
    """As JSON."""
    failure: str | None = None
    code: int = 0
    """Of the failure."""
