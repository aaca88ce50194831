"""Where the cache of compiled programs is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from rocserve.backends.migraphx.cache.store import ProgramCache, ignore_message, usual_spare_directory
from rocserve.settings import EngineSettings


def open_cache(settings: EngineSettings, warn: Callable[[str], None] = ignore_message) -> ProgramCache:
    """The cache that the settings name. `warn` is told, in a sentence, of what keeps it from being used as it should.

    Raises:
        ServeError: UNAVAILABLE, others than this user may write to its folder.
    """
    return ProgramCache(cache_directory(settings), settings.cache_bytes, warn=warn)


def cache_directory(settings: EngineSettings) -> Path:
    """The setting, else `rocserve` in $XDG_CACHE_HOME or ~/.cache; of a user without a home, among the temporary
    files."""
    if settings.cache_directory:
        return _expanded(settings.cache_directory).absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if base.startswith("/"):
        return Path(base) / "rocserve"
    home = _expanded("~")
    return home / ".cache/rocserve" if home.is_absolute() else usual_spare_directory()


def _expanded(path: str) -> Path:
    # Path.expanduser fails for users that the machine does not know, as in containers; this leaves the "~".
    return Path(os.path.expanduser(path))  # noqa: PTH111
