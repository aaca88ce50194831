"""Where what engines have compiled is kept."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from rocserve.settings import EngineSettings


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


def usual_spare_directory() -> Path:
    """This user's folder among the temporary files."""
    return Path(tempfile.gettempdir()) / f"rocserve-cache-{os.geteuid()}"


def _expanded(path: str) -> Path:
    # Path.expanduser fails for users that the machine does not know, as in containers; this leaves the "~".
    return Path(os.path.expanduser(path))  # noqa: PTH111
