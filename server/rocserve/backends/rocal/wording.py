"""How errors show what a pipeline file says, and what may have been meant."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from typing import Any

_SHOWN = 80
"""Characters of a value; what is longer ends in dots."""


def shown(value: Any) -> str:
    """A value as JSON writes it, so that its writer knows it again."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def meant(name: Any, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: the known one that it is most like; nothing where none is like it."""
    if not isinstance(name, str):
        return ""
    by_case = {one.casefold(): one for one in known}
    likely = difflib.get_close_matches(name.casefold(), by_case, n=1)
    return f'; did you mean "{by_case[likely[0]]}"?' if likely else ""
