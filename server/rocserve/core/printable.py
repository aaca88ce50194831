"""Makes text from files and engines safe for a log and a terminal, and formats sizes and lists of names for people."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from difflib import get_close_matches


def printable(text: str) -> str:
    """Escape characters of a file's or an engine's text that could move a terminal's cursor or fake a log line."""
    if text.isprintable():
        return text
    escaped = (one if one == "\t" or one.isprintable() else one.encode("unicode_escape").decode() for one in text)
    return "".join(escaped)


def without_colours(text: str) -> str:
    """Remove a terminal's colours and weights, which some libraries put into the texts of their errors."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def printable_line(line: bytes, longest: int) -> str:
    """Decode a line that a process wrote, cut to `longest` bytes, without colours."""
    text = without_colours(line[:longest].decode("utf-8", "backslashreplace")).rstrip()
    return printable(text + " ... (cut)" if len(line) > longest else text)


def printable_name(name: str) -> str:
    """Escape a file name; bytes that are not UTF-8 appear in hexadecimal."""
    return printable(os.fsencode(name).decode("utf-8", "backslashreplace"))


def shortened(text: str, most: int = 255) -> str:
    """Cut a client's text that has more than `most` characters, and say how many it has."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def encodable(text: str) -> str:
    """Return the text without lone surrogates, which file names and JSON may contain and UTF-8 cannot encode."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def readable_size(count: int) -> str:
    """Return for example "512 B", "1.5 MiB", "12.00 GiB", "1.25 TiB"."""
    amount = float(count)
    for unit, decimals in (("B", 0), ("KiB", 1), ("MiB", 1), ("GiB", 2)):
        if amount < 1024:
            return f"{amount:.{decimals}f} {unit}"
        amount /= 1024
    return f"{amount:.2f} TiB"


def names_hint(what: str, name: str, names: Collection[str]) -> str:
    """Return for example "; its inputs are: images, size; did you mean 'images'?". `what` introduces the list."""
    if not names:
        return ""
    ordered = sorted(names)
    hint = f"; {what}: {listed(ordered)}"
    if len(ordered) == 1 or len(name) > 64:
        return hint
    # If there are many names, only names with the same first letter are compared.
    # A comparison takes about 10 us of the data plane's thread.
    alike = ordered if len(ordered) <= 16 else [one for one in ordered if one[:1] == name[:1]]
    meant = get_close_matches(name, alike[:16], n=1)
    return f"{hint}; did you mean '{meant[0]}'?" if meant else hint


def listed(texts: Sequence[str], between: str = ", ") -> str:
    """Join the first texts, and say how many more there are."""
    most = 8
    more = (f"and {len(texts) - most} more",) if len(texts) > most else ()
    return between.join((*texts[:most], *more))
