"""Files that a configuration names: only those within the model's folder, or its repository, are ever opened."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from rocserve.core.errors import invalid_argument


def resolve_within(base: Path, name: str, roots: tuple[Path, ...], what: str) -> Path:
    """The file that `name`, relative to `base`, names. It need not exist.

    Raises:
        ServeError: INVALID_ARGUMENT when the name is absolute, has `..`, or leads out of all `roots` by a link.
    """
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts:
        raise invalid_argument(
            f"{what} '{name}' must be a path within the folder {base.name}, without '..' and not absolute"
        )
    path = base / pure
    try:
        target = path.resolve()
    except (OSError, RuntimeError):
        raise invalid_argument(f"{what} '{name}' is a link that leads nowhere") from None
    if not any(target.is_relative_to(root.resolve()) for root in roots):
        raise invalid_argument(f"{what} '{name}' is a link that leads out of the model repository, to {target}")
    return path
