"""The hint behind an unknown name: the known names, and which was probably meant."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

_MOST_LISTED = 8
_MOST_COMPARED = 16
"""A comparison takes some 10 us of the data plane's thread."""
_LONGEST_COMPARED = 64


def names_hint(what: str, name: str, names: Collection[str]) -> str:
    """E.g. "; its inputs are: images, size; did you mean 'images'?". `what`: begins the list."""
    if not names:
        return ""
    ordered = sorted(names)
    more = f", and {len(ordered) - _MOST_LISTED} more" if len(ordered) > _MOST_LISTED else ""
    listed = f"; {what}: {', '.join(ordered[:_MOST_LISTED])}{more}"
    if len(ordered) == 1 or len(name) > _LONGEST_COMPARED:
        return listed
    # Of many those that begin alike.
    alike = ordered if len(ordered) <= _MOST_COMPARED else [each for each in ordered if each[:1] == name[:1]]
    meant = get_close_matches(name, alike[:_MOST_COMPARED], n=1)
    return f"{listed}; did you mean '{meant[0]}'?" if meant else listed
