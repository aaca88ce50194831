"""What a verb of the command is: its options, and what runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


class UsageError(Exception):
    """The options contradict each other; ends the command as a wrong option does."""


@dataclass(frozen=True, slots=True)
class Verb:
    """Each verb's module has one as `VERB`."""

    description: str
    options: Any = None
    """The dataclass of its options, with its defaults."""
    run: Callable[[Any], int | None] = lambda _: None
    """Takes the options as they were given; returns the exit status, None for 0. Raises: ServeError, UsageError."""
    subject: Callable[[Any], object] = lambda _: ""
    """Of the options: what its errors are about."""
    actions: Mapping[str, tuple[str, Verb]] = field(default_factory=dict)
    """In place of options and run: its own verbs, each with its help."""
