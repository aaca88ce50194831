"""Adds remedies to the messages of engines and the kernel."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial


def read_hints(text: str) -> Mapping[str, str]:
    """Parse entries: lines without indent are alternative regular expressions for a message, the others a remedy."""
    found = re.findall(r"^((?:[^ #\n].*\n)+)((?: .*\n)+)", text, re.MULTILINE)
    entries = ((pattern.splitlines(), remedy.split()) for pattern, remedy in found)
    return {"|".join(alternatives): " ".join(words) for alternatives, words in entries}


def add_hint(message: str, hints: Mapping[str, str]) -> str:
    """Return the message, followed by the remedy of the first expression that matches it."""
    return next((f"{message}; {remedy}" for pattern, remedy in hints.items() if re.search(pattern, message)), message)


MACHINE_HINTS = read_hints(r"""
^it was killed by signal 9
    the kernel does this when memory runs out, and logs it (dmesg): then use smaller batch_sizes, compile
    fewer models at once, or give the server (its container) more memory
bad_alloc|Cannot allocate memory
    this machine's memory does not suffice (or a damaged file asks for far too much): use smaller batch_sizes, compile
    fewer models at once, or give the server (its container) more memory
No space left on device
    a disk is full: --cache-directory and the temporary folder need room
""")
with_hint = partial(add_hint, hints=MACHINE_HINTS)
"""Adds remedies to messages that may come from any engine."""
