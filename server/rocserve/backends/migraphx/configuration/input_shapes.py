"""The parameter `input_shapes`: sizes for inputs whose model leaves dimensions open.

image: 3x224x224; mask: 224x224        or as JSON        {"image": [3, 224, 224], "mask": [224, 224]}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from rocserve.core.errors import ServeError, invalid_argument

_MOST_ELEMENTS = 1 << 34


def parse_input_shapes(text: str, model: str) -> Mapping[str, tuple[int, ...]]:
    """By input; the batch dimension, where the model has max_batch_size, is not among them.

    Raises:
        ServeError: INVALID_ARGUMENT; the text is no such list.
    """
    entries = _json_entries(text, model) if text.startswith("{") else _plain_entries(text, model)
    for name, shape in entries.items():
        if any(dim < 1 for dim in shape) or math.prod(shape) > _MOST_ELEMENTS:
            raise _wrong(
                text, model, f"the dimensions of '{name}' must be 1 or more, and a tensor that memory can hold"
            )
    return entries


def _plain_entries(text: str, model: str) -> dict[str, tuple[int, ...]]:
    entries: dict[str, tuple[int, ...]] = {}
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        # Names may hold colons ("input:0"); dimensions cannot.
        name, colon, dims = (part.strip() for part in entry.rpartition(":"))
        if not colon or not name:
            raise _wrong(text, model, f"'{entry}' has no name")
        if name in entries:
            raise _wrong(text, model, f"'{name}' is there twice")
        words = [word.strip() for word in dims.lower().split("x")]
        if not all(word.isascii() and word.isdecimal() and len(word) <= 12 for word in words):
            raise _wrong(text, model, f"'{dims}' are no dimensions")
        entries[name] = tuple(int(word) for word in words)
    return entries


def _json_entries(text: str, model: str) -> dict[str, tuple[int, ...]]:
    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        raise _wrong(text, model, "the JSON cannot be read") from None
    for name, dims in table.items():
        if not isinstance(dims, list) or not all(type(dim) is int for dim in dims):
            raise _wrong(text, model, f"'{name}' must have a list of whole numbers")
    return {name: tuple(dims) for name, dims in table.items()}


def _wrong(text: str, model: str, why: str) -> ServeError:
    shown = text if len(text) <= 200 else text[:200] + "..."
    return invalid_argument(
        f"parameter 'input_shapes' of model '{model}' must be like \"image: 3x224x224; mask: 224x224\" (without the"
        f' batch dimension), not "{shown}": {why}'
    )
