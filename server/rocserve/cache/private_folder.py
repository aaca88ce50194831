"""Folders whose programs are run: only their owner, who runs the server, may write there."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from rocserve.core.errors import ServeError, unavailable
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


_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def make_private(folder: Path) -> None:
    """Make the folder, with those above it, for this user alone (mode 0700), or check the one that is there.

    Raises:
        ServeError: UNAVAILABLE, others could have put files into it.
        OSError: it is not there and cannot be made.
    """
    try:
        folder.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        pass
    check_private(folder)


def check_private(folder: Path) -> None:
    """Raises: ServeError: UNAVAILABLE, others could have put files into it. OSError: it is not there."""
    found = folder.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise unavailable(f"cache directory {folder} is not used: it is no folder; name another with --cache-directory")
    if not _is_trusted(found.st_uid):
        reason = f"it belongs to user {found.st_uid}, not to {os.geteuid()}, who runs this"
        raise _refusal(folder, reason, "name another")
    if found.st_mode & _WRITABLE_BY_OTHERS:
        reason = f"others may write to it (mode {stat.S_IMODE(found.st_mode):04o})"
        raise _refusal(folder, reason, f"run chmod go-w {folder}, or name a folder in it")


def is_private(folder: Path) -> bool:
    """Whether it is there, and nobody else could have put files into it."""
    try:
        check_private(folder)
    except (OSError, ServeError):
        return False
    return True


def is_private_file(found: os.stat_result) -> bool:
    """Whether nobody but this user, or root, can have written the file."""
    return _is_trusted(found.st_uid) and not found.st_mode & _WRITABLE_BY_OTHERS


def _is_trusted(user: int) -> bool:
    # What root has written, such as a part of a container's image, is as good as our own program.
    return user in (0, os.geteuid())


def _refusal(folder: Path, reason: str, remedy: str) -> ServeError:
    return unavailable(
        f"cache directory {folder} is not used: {reason}, and the compiled programs in it are run as they are;"
        f" {remedy} with --cache-directory, which is then made with mode 0700"
    )
