"""Detects, from the names of dimensions alone, that the first dimension does not count rows."""

from __future__ import annotations

import re
from collections.abc import Mapping

_ROWS = re.compile(r"batch|^n$|^(num_)?(rows|samples|examples)$", re.IGNORECASE)
"""Names that people give to the dimension of rows. Two of them may name the same dimension."""


def names_disagree(inputs: Mapping[str, object], outputs: Mapping[str, object]) -> str:
    """Return which tensor names its first dimension differently from the first tensor, if people chose both names and
    not both mean rows; "" = none. Both map a tensor to its first dimension: a number, a name, or None."""
    # Names that a person chose. Exporters number theirs: unk__6, s77, p2o.DynamicDimension.0.
    named = [
        (kind, tensor, name)
        for kind, tensors in (("input", inputs), ("output", outputs))
        for tensor, name in tensors.items()
        if isinstance(name, str) and re.fullmatch(r"[A-Za-z_]+", name)
    ]
    if not named:
        return ""
    (what, first, rows), *others = named
    for kind, tensor, name in others:
        if name != rows and not (_ROWS.search(name) and _ROWS.search(rows)):
            return f"{kind} '{tensor}' has '{name}' rows, {what} '{first}' has '{rows}'"
    return ""
