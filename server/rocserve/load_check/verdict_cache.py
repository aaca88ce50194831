"""Keeps verdicts, so that a check runs once for all that it depends on. A verdict is a small JSON file in the cache."""

from __future__ import annotations

import hashlib
import json
import secrets
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from rocserve.cache.folders import is_private, make_private
from rocserve.core.errors import ServeError
from rocserve.core.plain import from_json, to_json

_FOLDER = "verdicts"
_REVISION = 1
"""Increase it when a check decides otherwise, so that older verdicts are not used."""
_MOST_VERDICTS = 4000
"""The oldest are removed first. A verdict has less than a block of a file system."""

Verdict = TypeVar("Verdict")


def verdict_key(check: str, *parts: str) -> str:
    """Return the name of a verdict: 64 hexadecimal digits. `parts`: everything that it depends on, such as the model's
    digest, the engine with its version, the device, the precision and the sizes."""
    return hashlib.sha256(json.dumps([_REVISION, check, *parts]).encode()).hexdigest()


class VerdictCache:
    """Finds and keeps verdicts in a folder of the cache directory. Without a folder that can be written, or that is
    this user's alone, verdicts are lost silently, and the next load checks again."""

    def __init__(self, cache_directory: Path) -> None:
        self._folder = cache_directory / _FOLDER

    def find(self, key: str, kind: type[Verdict]) -> Verdict | None:
        """Return the verdict, a dataclass of type `kind`; None = there is none, or another version wrote it."""
        if not is_private(self._folder):
            return None
        try:
            return from_json(kind, (self._folder / key).read_bytes())
        except (OSError, ValueError):
            return None

    def remember(self, key: str, verdict: object) -> None:
        new = self._folder / f".{secrets.token_hex(8)}"
        with suppress(OSError, ServeError):
            make_private(self._folder)
            try:
                new.write_bytes(to_json(verdict))
                new.replace(self._folder / key)
            finally:
                new.unlink(missing_ok=True)
            kept = [path for path in self._folder.iterdir() if not path.name.startswith(".")]
            for path in sorted(kept, key=lambda path: path.stat().st_mtime)[:-_MOST_VERDICTS]:
                path.unlink(missing_ok=True)
