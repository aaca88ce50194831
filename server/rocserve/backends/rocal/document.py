"""Reads a pipeline file's JSON, and refuses what JSON's readers commonly let pass."""

from __future__ import annotations

import json
from typing import Any

from rocserve.backends.rocal.schema import PipelineError
from rocserve.backends.rocal.wording import shown


def read_document(text: str | bytes) -> dict[str, Any]:
    """The object that the file holds.

    Raises:
        PipelineError: it is not JSON, no object, or has a key twice, of which one would be lost.
    """
    expected = 'expected an object {"pipeline": [...]}'
    if not text.strip():
        raise PipelineError(f"the file is empty; {expected}")
    try:
        document = json.loads(text, object_pairs_hook=_table)
    except ValueError as error:
        if isinstance(error, PipelineError):
            raise
        raise PipelineError(f"not valid JSON: {error}") from None
    except RecursionError:
        raise PipelineError("not a pipeline: its lists and objects are nested too deeply to be read") from None
    if not isinstance(document, dict):
        raise PipelineError(f"{expected}, not {shown(document)}")
    return document


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise PipelineError(f"key '{twice}' stands twice in one object ({shown(table)}); leave one out")
    return table
