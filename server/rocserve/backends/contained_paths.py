"""Checks paths in configurations and model files: only files within the model's folder are opened."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from rocserve.core.errors import invalid_argument, unreadable


def path_within(base: Path, name: str, roots: Sequence[Path], what: str) -> Path:
    """Return the path that `name` means in the folder `base`; links may lead anywhere in `roots`, and the file may be
    missing. `what`: for errors. Raises ServeError (INVALID_ARGUMENT) if the name is empty, absolute, contains `..`,
    leads out, or cannot be looked up."""
    pure = PurePosixPath(name)
    if not name or "\0" in name or pure.is_absolute() or ".." in pure.parts:
        raise invalid_argument(f"{what} '{name}' must be a path within its folder, without '..' and not absolute")
    try:
        target = (base / pure).resolve()
    except (OSError, RuntimeError):
        raise invalid_argument(f"{what} '{name}' is a link that leads nowhere") from None
    if not any(target.is_relative_to(root.resolve()) for root in roots):
        raise invalid_argument(f"{what} '{name}' is a link that leads out of the model's folder, to {target}")
    try:
        target.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass  # The caller reports that the file does not exist.
    except OSError as error:
        raise unreadable(f"{what} '{name}' cannot be read: {error.strerror}", error) from None
    return target
