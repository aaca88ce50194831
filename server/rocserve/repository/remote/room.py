"""How much the copies of repositories elsewhere may take."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path

from rocserve.repository.remote.objects import StoreError

_FREE_SHARE = 10
"""A tenth of the disk stays free where nothing else is said: with less Kubernetes begins to evict."""
_IN_USE = "in-use"


def use(home: Path) -> TextIOWrapper:
    """Keep the copy of a repository from being removed, until the result is closed."""
    home.mkdir(parents=True, exist_ok=True)
    file = (home / _IN_USE).open("a")
    fcntl.flock(file, fcntl.LOCK_SH)
    # Tells which was used least lately.
    (home / _IN_USE).touch()
    return file


class Room:
    """Blocks on the disk."""

    def __init__(self, folder: Path, limit_bytes: int | None) -> None:
        """`folder`: holds the copies of all repositories; `limit_bytes`: None = all but a tenth of the disk."""
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._used: int | None = None
        """As it was counted last, and what has come since; None = not yet."""

    def make(self, needed: int, what: str) -> None:
        """Make sure that there is room: copies that no server uses go first, those used least lately before others.

        Raises:
            StoreError: there is not enough.
        """
        if not self._lack(needed):
            return
        unused = self._unused()
        self._used = None
        while (text := self._lack(needed)) and (home := next(unused, None)):
            shutil.rmtree(home, ignore_errors=True)
            self._used = None
        if text:
            raise StoreError(
                f"expected room for the {needed} bytes of {what}, came: {text}; make room, or raise"
                " --remote-cache-size-bytes"
            )

    def _lack(self, needed: int) -> str:
        """Why there is not enough; "" = there is, and it is counted as used."""
        if self._limit_bytes is None:
            disk = shutil.disk_usage(self._folder)
            lacks = disk.free - needed < disk.total // _FREE_SHARE
            return f"{disk.free} bytes free in '{self._folder}', of which a tenth of the disk stays so" if lacks else ""
        if self._used is None:
            self._used = sum(
                file.lstat().st_size // file.lstat().st_nlink for file in self._folder.rglob("*") if file.is_file()
            )
        if self._used + needed > self._limit_bytes:
            return f"{self._used} bytes in '{self._folder}', which may have {self._limit_bytes}"
        self._used += needed
        return ""

    def _unused(self) -> Iterator[Path]:
        marks = sorted(self._folder.glob(f"*/{_IN_USE}"), key=lambda mark: mark.stat().st_mtime)
        for mark in marks:
            with mark.open("a") as file, contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield mark.parent
