"""Small values in a folder, a JSON file each."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from rocserve.core.plain import from_json, to_json

Value = TypeVar("Value")


def read_entry(folder: Path, name: str, kind: type[Value]) -> Value | None:
    """Return the value, of type `kind` (see core/plain.py); None = there is none, or another version wrote it."""
    try:
        return from_json(kind, (folder / name).read_bytes())
    except (OSError, ValueError):
        return None


def write_entry(folder: Path, name: str, value: object, most: int) -> None:
    """Keep a value, whole or not at all; of more than `most` values the oldest are removed. Raises OSError."""
    new = folder / f".{secrets.token_hex(8)}"
    try:
        new.write_bytes(to_json(value))
        new.replace(folder / name)
    finally:
        new.unlink(missing_ok=True)
    for path in sorted(entry_files(folder), key=lambda path: path.stat().st_mtime)[:-most]:
        path.unlink(missing_ok=True)


def entry_files(folder: Path) -> Sequence[Path]:
    """Return the files of the values; empty = the folder cannot be read."""
    try:
        return [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError:
        return []
