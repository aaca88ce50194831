"""Caches verdicts, so that a check runs once for the same model and engine. A verdict is a small JSON file."""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from rocserve.cache.digests import file_digest, joined_digests
from rocserve.cache.entries import entry_files, read_entry, write_entry
from rocserve.cache.folders import FileLock, is_private, make_private, try_lock
from rocserve.core.errors import ServeError

_MOST_VERDICTS = 4000
"""The oldest are removed first. A verdict has less than a block of a file system."""

_WORTH_BYTES = 1 << 20
"""Size from which a file's digest is cached too: reading a smaller file takes as long as finding its digest."""
_POLL_SECONDS = 0.02
"""How often a process that waits for another's verdict checks again: small models take some 50 ms."""
_UNCHANGED_SECONDS = 0.1
"""A file counts as unchanged if it has the same times as before, and these were so old then: file systems count time in
ticks of some 10 ms."""

Verdict = TypeVar("Verdict")


@functools.cache
def _revision() -> str:
    """Return a digest of this package's code: another version of it may decide otherwise."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()


def verdict_key(check: str, *parts: str) -> str:
    """Return the name of a verdict: 64 hexadecimal digits. `parts`: everything that it depends on, such as the model's
    digest, the engine with its version, the device, the precision and the sizes."""
    return hashlib.sha256(json.dumps([_revision(), check, *parts]).encode()).hexdigest()


class VerdictCache:
    """Finds and keeps verdicts in a folder of the cache directory. Without a folder that can be written, or that is
    this user's alone, verdicts are lost silently, and the next load checks again."""

    def __init__(self, cache_directory: Path) -> None:
        self._folder = cache_directory / "verdicts"

    def find(self, key: str, kind: type[Verdict]) -> Verdict | None:
        """Return the verdict, of type `kind` (see core/plain.py); None = there is none, or another version wrote it."""
        return read_entry(self._folder, key, kind) if is_private(self._folder) else None

    def remember(self, key: str, verdict: object) -> None:
        with suppress(OSError, ServeError):
            make_private(self._folder)
            write_entry(self._folder, key, verdict, _MOST_VERDICTS)

    @property
    def count(self) -> int:
        """How many verdicts are kept, with the digests of large files."""
        return len(entry_files(self._folder))

    def forget_all(self) -> int:
        """Remove all verdicts; return how many. Raises OSError if the folder cannot be written."""
        kept = entry_files(self._folder)
        for path in kept:
            path.unlink(missing_ok=True)
        return len(kept)

    def find_or_check(
        self,
        key: str,
        kind: type[Verdict],
        check: Callable[[], Verdict],
        is_lasting: Callable[[Verdict], bool],
        wait_seconds: float,
    ) -> tuple[Verdict, float]:
        """Return the verdict, checked if there is none, and the seconds that the check took; 0 = it was known. One
        worker of a version checks, and the others wait for it, at most `wait_seconds`. `is_lasting`: whether another
        check would find the same; else only the workers that wait now use the verdict."""
        end, passing, lock = time.monotonic() + wait_seconds, verdict_key("passing", key), None
        old = self._written(passing)

        def find() -> Verdict | None:
            return self.find(key, kind) or (self.find(passing, kind) if self._written(passing) != old else None)

        while (known := find()) is None:
            lock, can_wait = self._try_lock(key)
            if lock is not None or not can_wait or time.monotonic() > end:
                break
            # Polling, because a blocking flock would delay Python's signal handlers.
            time.sleep(_POLL_SECONDS)
        try:
            # Another process may have remembered it before this one had the lock.
            known = known or find()
            if known is not None:
                return known, 0.0
            started = time.monotonic()
            verdict = check()
            self.remember(key if is_lasting(verdict) else passing, verdict)
            return verdict, time.monotonic() - started
        finally:
            if lock is not None:
                with suppress(OSError):
                    lock.release()

    def _written(self, key: str) -> tuple[int, int] | None:
        """Return a stamp that changes when a verdict is written again; None = there is none."""
        try:
            found = (self._folder / key).stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    def digest(self, path: Path, more: Sequence[Path] = ()) -> str:
        """Return `file_digest`, of files that have not changed since an earlier call without reading them: a file of a
        gigabyte takes seconds. Raises ServeError (UNAVAILABLE) if a file cannot be read."""
        return joined_digests([self._digest(file) for file in (path, *more)])

    def _digest(self, path: Path) -> str:
        try:
            found = path.stat()
        except OSError:
            return file_digest(path)
        state = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        key = verdict_key("digest", *map(str, state))
        if found.st_size < _WORTH_BYTES:
            return file_digest(path)
        if (known := self.find(key, str)) is not None:
            return known
        is_settled = time.time() - max(found.st_mtime, found.st_ctime) > _UNCHANGED_SECONDS
        digest = file_digest(path)
        if is_settled:
            self.remember(key, digest)
        return digest

    def _try_lock(self, key: str) -> tuple[FileLock | None, bool]:
        """Return the lock of a verdict, None if another process has it, and whether waiting for it makes sense."""
        try:
            make_private(self._folder)
            lock = try_lock(self._folder / f".{key}.lock")
        except (OSError, ServeError):
            return None, False
        return lock, True
