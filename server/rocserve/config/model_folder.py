"""A model's folder as one reading of its configuration sees it: listed once, whoever asks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path, PurePosixPath

from rocserve.config.versions import is_version_name
from rocserve.core.errors import invalid_argument


class Listing:
    """The files and folders of a folder at one moment; those of one that cannot be read are none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: Mapping[str, os.DirEntry[str]] = {}
        self.error = ""
        """Why it could not be read."""
        try:
            with os.scandir(path) as entries:
                self.entries = {entry.name: entry for entry in entries}
        except OSError as error:
            self.error = error.strerror or str(error)

    @property
    def visible(self) -> list[str]:
        return sorted(name for name in self.entries if not name.startswith("."))

    @property
    def folders(self) -> list[str]:
        return sorted(entry.name for entry in self.entries.values() if is_so(entry.is_dir))

    def has_file(self, name: str) -> bool:
        return (entry := self.entries.get(name)) is not None and is_so(entry.is_file)

    def has(self, path: str) -> bool:
        """Whether there is a file or folder at this relative path; a link that leads nowhere is none."""
        if "/" not in path:
            entry = self.entries.get(path)
            if entry is None or not entry.is_symlink():
                return entry is not None
        return (self.path / path).exists()


class ModelFolder:
    """Opens what a configuration names only within the model's folder, or the repository that it is in."""

    def __init__(self, path: Path, repository: Path | None = None) -> None:
        """`repository`: links may lead to elsewhere in it; None: they stay in the model's folder."""
        self.path = path
        self._repository = repository

    @cached_property
    def listing(self) -> Listing:
        return Listing(self.path)

    @cached_property
    def versions(self) -> tuple[int, ...]:
        """Ascending: the sub-folders with integer names (a leading zero makes none)."""
        return tuple(sorted(int(name) for name in self.listing.folders if is_version_name(name)))

    @cached_property
    def places(self) -> tuple[Listing, ...]:
        """Where the model's file may be: the version folders, highest first; without any, the folder itself (a model
        mounted without versions)."""
        return tuple(Listing(self.path / str(version)) for version in reversed(self.versions)) or (self.listing,)

    @property
    def ignored_versions(self) -> tuple[str, ...]:
        """What Triton warns of: sub-folders that would be versions but for zeros in front."""
        return tuple(
            f"ignore version directory '{name}' which contains leading zeros in its directory name"
            for name in self.listing.folders
            if len(name) > 1 and name.startswith("0") and name.isascii() and name.isdigit()
        )

    def resolve(self, name: str, what: str, below: str = "") -> Path:
        """The file that `name` names, relative to the folder or one `below` it. It need not exist.

        Raises:
            ServeError: INVALID_ARGUMENT when the name is absolute, has `..`, or leads out by a link.
        """
        base = self.path / below
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts:
            raise invalid_argument(
                f"{what} '{name}' must be a path within the folder {base.name}, without '..' and not absolute"
            )
        path = base / pure
        if path.parent == self.path:
            entry = self.listing.entries.get(pure.name)
            if entry is None or not entry.is_symlink():
                return path
        try:
            target = path.resolve()
        except (OSError, RuntimeError):
            raise invalid_argument(f"{what} '{name}' is a link that leads nowhere") from None
        if not any(target.is_relative_to(root) for root in self._roots):
            raise invalid_argument(f"{what} '{name}' is a link that leads out of the model repository, to {target}")
        return path

    def find(self, name: str, what: str) -> Path | None:
        """The file of this name, as `resolve` gives it; None: there is none."""
        path = self.resolve(name, what)
        is_there = self.listing.has_file(name) if "/" not in name else path.is_file()
        return path if is_there else None

    @cached_property
    def _roots(self) -> tuple[Path, ...]:
        return tuple(root.resolve() for root in (self.path, self._repository) if root is not None)


def is_so(ask: Callable[[], bool]) -> bool:
    """What an entry of a folder answers. A link to itself, or to where the server may not look, is neither a file nor
    a folder."""
    try:
        return ask()
    except OSError:
        return False
