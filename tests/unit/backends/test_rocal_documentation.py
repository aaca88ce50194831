"""The documentation's tables of operations against the operations: names, keys and defaults."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rocserve.backends.rocal.decoding.options import DEFAULT_MAX_PIXELS, DecoderOptions
from rocserve.backends.rocal.image import MAX_RESULT_PIXELS
from rocserve.backends.rocal.operations import OPERATIONS
from rocserve.backends.rocal.operations.base import Operation
from rocserve.backends.rocal.pipeline import RANDOM_OPERATIONS
from rocserve.backends.rocal.schema import REQUIRED

DOCUMENTATION = Path(__file__).resolve().parents[3] / "docs/reference"
OF_THE_SERVERS_JSON = (DOCUMENTATION / "rocal.md").read_text()
OF_FN = (DOCUMENTATION / "rocal-operations.md").read_text()

ROWS: dict[str, str] = {
    name: found[2]
    for text in (OF_THE_SERVERS_JSON, OF_FN)
    for found in re.finditer(r"^\| (`\w+`(?:, `\w+`)*) \| ([^|]*) \|", text, re.MULTILINE)
    for name in re.findall(r"\w+", found[1])
    if name in OPERATIONS
}
"""Operation -> the table's cell of its keys."""

KEY = re.compile(r"`(\w+)`(?: ?= ?(\[[^\]]*\]|[-\w.]+))?")
REFERENCES = {"the same sizes": "resize", "the rest as `rotate`": "rotate", "the same": "brightness_fixed"}
"""Words that stand for the keys of another row."""
EITHER_OR = {"crop", "crop_h", "crop_w"}
"""Alternative keys: the documentation shows no default for them."""


def documented(name: str) -> dict[str, str | None]:
    """Key -> its default as written; None = it has none."""
    cell = ROWS[name]
    keys: dict[str, str | None] = {}
    for words, other in REFERENCES.items():
        if words in cell and other != name:
            keys |= {key: default for key, default in documented(other).items() if key in OF_IMAGES[name].keys}
            cell = cell.replace(words, "")
    return keys | {found[1]: found[2] for found in KEY.finditer(cell) if found[1] != "inputs"}


def value_of(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def test_every_operation_has_a_row() -> None:
    assert set(ROWS) == set(OPERATIONS)
    for name in RANDOM_OPERATIONS:
        assert f"`{name}`" in OF_FN


OF_IMAGES = {name: operation for name, operation in OPERATIONS.items() if isinstance(operation, Operation)}


@pytest.mark.parametrize("name", sorted(OF_IMAGES))
def test_keys_and_their_defaults(name: str) -> None:
    operation = OF_IMAGES[name]
    keys = documented(name)
    for key, default in keys.items():
        if key in operation.keys and key not in EITHER_OR:
            known = operation.keys[key]
            assert (default is None) == (known.default is REQUIRED), key
            if default is not None:
                assert known.read(value_of(default)) == known.default, key
    assert set(operation.keys) <= set(keys)
    assert set(keys) <= {*operation.keys, *operation.ignored_keys}
    for key in operation.ignored_keys:
        assert f"`{key}`" in OF_THE_SERVERS_JSON + OF_FN, key


def test_keys_of_the_decoder() -> None:
    rows = dict(re.findall(r"^\| (`[^|]*`) \| [^|]* \| ([^|]*) \|$", OF_THE_SERVERS_JSON, re.MULTILINE))
    options = DecoderOptions()
    assert rows["`max_width`, `max_height`"] == str(options.max_width) == str(options.max_height)
    assert rows["`exif`"] == f"`{json.dumps(options.exif)}`"
    assert rows["`input`"] == f"`{'raw' if options.is_raw else 'encoded'}`"
    assert rows["`max_pixels`"] == str(DEFAULT_MAX_PIXELS)
    assert str(MAX_RESULT_PIXELS) in OF_THE_SERVERS_JSON
