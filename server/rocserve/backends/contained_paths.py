"""Paths that a configuration or a model file names: only those within the model's folder are ever opened."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from rocserve.core.errors import invalid_argument


def path_within(base: Path, name: str, roots: Sequence[Path], what: str) -> Path:
    """What `name` names within the folder `base`, and links anywhere within `roots`; it need not exist. `what`: how
    errors call it. Raises: ServeError: INVALID_ARGUMENT; the name is empty, absolute, has `..`, leads out, or cannot be
    looked up."""
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
        pass  # That it is not there is for the caller to say.
    except OSError as error:
        raise invalid_argument(f"{what} '{name}' cannot be read: {error.strerror}") from None
    return target
