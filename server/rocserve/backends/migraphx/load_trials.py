"""Remembers the trials of users' own .mxr files, so that a file that crashes MIGraphX is tried once.

A trial is of a file's bytes in an environment: a changed file, another MIGraphX or another GPU is tried anew.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rocserve.backends.migraphx.planning.recipe import ProgramEnvironment
from rocserve.core.plain import from_json, to_json

_MOST = 1000
"""Load trials kept in a folder; the oldest go."""


@dataclass(frozen=True, slots=True)
class LoadTrial:
    model: str
    file: str
    """The file's name."""
    migraphx_version: str
    crash: str = ""
    """How it ended the process, which is why it is not tried again; "" = it was loaded and run."""
    time: float = field(default_factory=time.time)
    """In seconds since 1970."""


def load_trial_key(digest: str, environment: ProgramEnvironment, target: str = "") -> str:
    """64 hexadecimal digits for a file's digest in an environment."""
    text = json.dumps([digest, target, json.loads(to_json(environment))], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class LoadTrials:
    """Those in a folder, a file each; `spare` takes new ones where that cannot be written."""

    directory: Path
    spare: Path | None = None

    def find(self, key: str) -> LoadTrial | None:
        return next(filter(None, (_read(folder / key) for folder in self._folders)), None)

    def remember(self, key: str, trial: LoadTrial) -> None:
        """Where a folder can be written."""
        folder = self._folders[-1]
        new = folder / f".{secrets.token_hex(8)}"
        with suppress(OSError):
            try:
                new.write_bytes(to_json(trial))
                new.replace(folder / key)
            finally:
                new.unlink(missing_ok=True)
            for path in sorted(_files(folder), key=lambda path: path.stat().st_mtime)[:-_MOST]:
                path.unlink(missing_ok=True)

    def entries(self) -> Sequence[tuple[str, LoadTrial]]:
        """Keys and load trials, the oldest first."""
        found = {path.name: _read(path) for folder in reversed(self._folders) for path in _files(folder)}
        trials = [(key, trial) for key, trial in found.items() if trial is not None]
        return sorted(trials, key=lambda entry: entry[1].time)

    def forget(self, key: str) -> None:
        """Raises: OSError: it cannot be removed."""
        for folder in self._folders:
            (folder / key).unlink(missing_ok=True)

    @property
    def _folders(self) -> Sequence[Path]:
        return (self.directory,) if self.spare is None else (self.directory, self.spare)


def _files(folder: Path) -> Sequence[Path]:
    try:
        return [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError:
        return []


def _read(path: Path) -> LoadTrial | None:
    """None where there is none, or one that another version of rocserve has written."""
    try:
        return from_json(LoadTrial, path.read_bytes())
    except (OSError, ValueError):
        return None
