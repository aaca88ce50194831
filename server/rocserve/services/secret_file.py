"""Reads a secret from a file, again when the file has changed."""

from __future__ import annotations

import logging
import time
from pathlib import Path

_LOOK_SECONDS = 1.0
"""How long a look at the file is good for: a call costs no look of its own."""


class SecretFile:
    """May be asked from any thread."""

    def __init__(self, path: Path, log: logging.Logger) -> None:
        """Raises: OSError, ValueError: there is no secret in it."""
        self._path = path
        self._log = log
        self._mark = self._look()
        self._value = self._read()
        self._looked_at = time.monotonic()

    def value(self) -> str:
        """The secret; while the file cannot be read, or is empty, the last one."""
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_SECONDS:
            self._looked_at = now
            self._renew()
        return self._value

    def _renew(self) -> None:
        try:
            mark = self._look()
            if mark != self._mark:
                self._value = self._read()
                self._mark = mark
                self._log.info("the secret in %s has been renewed", self._path)
        except (OSError, ValueError) as error:
            self._log.warning("the secret in %s stays as it was: %s", self._path, error)

    def _look(self) -> tuple[int, int, int]:
        found = self._path.stat()
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> str:
        text = self._path.read_bytes().decode(errors="surrogateescape").rstrip("\r\n")
        if not text:
            raise ValueError(f"{self._path} holds no secret: it is empty")
        return text
