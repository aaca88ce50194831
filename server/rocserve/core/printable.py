"""Text from files and engines, made fit for a log and a terminal; and numbers of bytes as people read them."""

from __future__ import annotations

import os


def printable(text: str) -> str:
    """Text that cannot move a terminal's cursor or fake a line of the log: files and engines say what they like."""
    if text.isprintable():
        return text
    escaped = (each if each == "\t" or each.isprintable() else each.encode("unicode_escape").decode() for each in text)
    return "".join(escaped)


def printable_line(line: bytes, longest: int) -> str:
    """A line that a process wrote, cut at so many bytes."""
    text = line[:longest].decode("utf-8", "backslashreplace").rstrip()
    return printable(text + " ... (cut)" if len(line) > longest else text)


def printable_name(name: str) -> str:
    """A file's name, with what cannot be printed escaped; bytes that are no UTF-8 as \\xe9."""
    return printable(os.fsencode(name).decode("utf-8", "backslashreplace"))


def encodable(text: str) -> str:
    """Text that UTF-8 can say: file names may bring bytes that it cannot, and JSON lone surrogates."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


_UNITS = (("B", 0), ("KiB", 1), ("MiB", 1), ("GiB", 2))
"""With the decimals that each is written with."""


def readable_size(count: int) -> str:
    """E.g. "512 B", "1.5 MiB", "12.00 GiB", "1.25 TiB"."""
    amount = float(count)
    for unit, decimals in _UNITS:
        if amount < 1024:
            return f"{amount:.{decimals}f} {unit}"
        amount /= 1024
    return f"{amount:.2f} TiB"
