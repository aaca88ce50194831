"""Remedies for what an engine reports, or the kernel does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hint:
    pattern: str
    """A regular expression for a part of what the engine, or a library below it, wrote."""
    remedy: str


def add_hint(message: str, hints: Sequence[Hint]) -> str:
    """The message, and the remedy of the first that fits."""
    for one in hints:
        if re.search(one.pattern, message):
            return f"{message}; {one.remedy}"
    return message


def with_hint(message: str) -> str:
    """The message, and what to do about it where any engine could have said it."""
    return add_hint(message, MACHINE_HINTS)


MACHINE_HINTS: Sequence[Hint] = (
    Hint(
        r"^it was killed by signal 9",
        "the kernel does that where memory runs out, and says so in its log (dmesg): then use smaller batch_sizes,"
        " compile fewer models at once, or give the server (its container) more memory",
    ),
    Hint(
        r"bad_alloc|Cannot allocate memory",
        "this machine's memory does not suffice (or a damaged file asks for far too much): use smaller batch_sizes,"
        " compile fewer models at once, or give the server (its container) more memory",
    ),
    Hint(
        r"No space left on device",
        "a disk is full: --cache-directory and the temporary folder need room",
    ),
)
