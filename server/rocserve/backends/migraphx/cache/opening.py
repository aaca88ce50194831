"""Where the cache of compiled programs is."""

from __future__ import annotations

from collections.abc import Callable

from rocserve.backends.migraphx.cache.store import ProgramCache, ignore_message
from rocserve.cache.directory import cache_directory
from rocserve.settings import EngineSettings


def open_cache(settings: EngineSettings, warn: Callable[[str], None] = ignore_message) -> ProgramCache:
    """The cache that the settings name. `warn` is told, in a sentence, of what keeps it from being used as it should.

    Raises:
        ServeError: UNAVAILABLE, others than this user may write to its folder.
    """
    return ProgramCache(cache_directory(settings), settings.cache_bytes, warn=warn)
