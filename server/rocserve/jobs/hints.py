"""Remedies for what an engine reports, or the kernel does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial

_ENTRY = re.compile(r"^((?:[^ #\n].*\n)+)((?: .*\n)+)", re.MULTILINE)


def read_hints(text: str) -> Mapping[str, str]:
    """Remedies by regular expressions for a part of what the engine, or a library below it, wrote. Of an entry the
    lines without an indent are alternatives, those with one the remedy."""
    entries = ((pattern.splitlines(), remedy.split()) for pattern, remedy in _ENTRY.findall(text))
    return {"|".join(alternatives): " ".join(words) for alternatives, words in entries}


def add_hint(message: str, hints: Mapping[str, str]) -> str:
    """The message, and the remedy of the first that fits."""
    return next((f"{message}; {remedy}" for pattern, remedy in hints.items() if re.search(pattern, message)), message)


MACHINE_HINTS = read_hints(r"""
^it was killed by signal 9
    the kernel does that where memory runs out, and says so in its log (dmesg): then use smaller batch_sizes, compile
    fewer models at once, or give the server (its container) more memory
bad_alloc|Cannot allocate memory
    this machine's memory does not suffice (or a damaged file asks for far too much): use smaller batch_sizes, compile
    fewer models at once, or give the server (its container) more memory
No space left on device
    a disk is full: --cache-directory and the temporary folder need room
""")
with_hint = partial(add_hint, hints=MACHINE_HINTS)
"""The message, and what to do about it where any engine could have said it."""
