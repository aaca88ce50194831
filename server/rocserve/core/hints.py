"""Builds the hint for an unknown name: the known names, and the name that was probably meant."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from difflib import get_close_matches

_MOST_LISTED = 8
_MOST_COMPARED = 16
"""A comparison takes about 10 us of the data plane's thread."""
_LONGEST_COMPARED = 64


def names_hint(what: str, name: str, names: Collection[str]) -> str:
    """Return for example "; its inputs are: images, size; did you mean 'images'?". `what` introduces the list."""
    if not names:
        return ""
    ordered = sorted(names)
    hint = f"; {what}: {listed(ordered)}"
    if len(ordered) == 1 or len(name) > _LONGEST_COMPARED:
        return hint
    # If there are many names, only names with the same first letter are compared.
    alike = ordered if len(ordered) <= _MOST_COMPARED else [each for each in ordered if each[:1] == name[:1]]
    meant = get_close_matches(name, alike[:_MOST_COMPARED], n=1)
    return f"{hint}; did you mean '{meant[0]}'?" if meant else hint


def listed(texts: Sequence[str], between: str = ", ") -> str:
    """Join the first texts, and say how many more there are."""
    more = (f"and {len(texts) - _MOST_LISTED} more",) if len(texts) > _MOST_LISTED else ()
    return between.join((*texts[:_MOST_LISTED], *more))
