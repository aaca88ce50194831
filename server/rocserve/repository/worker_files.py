"""The files that clients name when they ask for a worker: only those in the folders that the operator allows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rocserve.core.errors import ServeError, StatusCode, not_found


@dataclass(frozen=True, slots=True)
class WorkerFile:
    path: Path
    """Resolved."""
    root: Path
    """The allowed folder that it is in, resolved; links may lead anywhere within it."""


class WorkerFiles:
    """Its method blocks on the disk: call it in a thread."""

    def __init__(self, repositories: Sequence[Path], allowed: Sequence[Path]) -> None:
        """`allowed`: folders beside the repositories (--allow-worker-load)."""
        self._repositories = tuple(repositories)
        self._folders = tuple(dict.fromkeys((*repositories, *allowed)))

    def find(self, candidates: Sequence[str]) -> WorkerFile:
        """The first of the files that is there. A relative path is one within a repository.

        Raises:
            ServeError: PERMISSION_DENIED, it is in no allowed folder; NOT_FOUND, there is none of them.
        """
        for path in (path for candidate in candidates for path in self._places(candidate)):
            found = self._allowed(path)
            if found is None:
                # Whether it is there is nobody's business.
                raise ServeError(
                    StatusCode.PERMISSION_DENIED,
                    f"'{path}' is not in a model repository; put it there, or start the server with"
                    " --allow-worker-load=FOLDER",
                )
            # A name that is too long is nobody's.
            with suppress(OSError):
                if found.path.is_file():
                    return found
        looked_for = ", ".join(candidates)
        raise not_found(f"model file {candidates[0]} not found or can't be opened; looked for {looked_for}")

    def _places(self, candidate: str) -> Iterable[Path]:
        path = Path(candidate)
        return [path] if path.is_absolute() else [root.absolute() / path for root in self._repositories]

    def _allowed(self, path: Path) -> WorkerFile | None:
        """None: it leads out of all folders that are allowed, by a link or by `..`."""
        try:
            target = path.resolve()
        except (OSError, RuntimeError):
            return None
        for folder in self._folders:
            root = folder.resolve()
            if target.is_relative_to(root):
                return WorkerFile(target, root)
        return None
