"""What the trial of a user's own .mxr came to, so that a file that crashes MIGraphX is tried once.

A trial is of a file's bytes in an environment: a changed file, another MIGraphX or another GPU is tried anew.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import json
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rocserve.backends.migraphx.binding.interface import ProgramTensor
from rocserve.backends.migraphx.planning.recipe import ProgramEnvironment
from rocserve.core.plain import from_json, to_json

_MOST = 1000
"""Load trials kept in a folder."""


class Outcome(enum.Enum):
    GOOD = "good"
    """It was loaded and run."""
    REFUSED = "refused"
    """MIGraphX, or a check of ours, says why it cannot be."""
    CRASHED = "crashed"
    """It ended the process, or came to no end."""


@dataclass(frozen=True, slots=True)
class LoadTrial:
    outcome: Outcome
    text: str
    """Why it is not used; "" for good ones."""
    model: str
    file: str
    """The file's name."""
    migraphx_version: str
    time: float
    """In seconds since 1970."""
    inputs: tuple[ProgramTensor, ...] = ()
    outputs: tuple[ProgramTensor, ...] = ()

    @property
    def quarantined(self) -> bool:
        """The file is not tried again."""
        return self.outcome is not Outcome.GOOD


def load_trial_key(digest: str, environment: ProgramEnvironment, target: str = "") -> str:
    """64 hexadecimal digits for a file's digest in an environment."""
    text = json.dumps([digest, target, json.loads(to_json(environment))], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class LoadTrials:
    """Those in a folder; `spare` takes new ones where that cannot be written."""

    directory: Path
    spare: Path | None = None

    def find(self, key: str) -> LoadTrial | None:
        for folder in self._folders():
            trial = _read(folder / key)
            if trial is not None:
                return trial
        return None

    def remember(self, key: str, trial: LoadTrial) -> bool:
        """Whether it could be written down."""
        for folder in self._folders():
            try:
                _replace(folder / key, to_json(trial))
            except OSError:
                continue
            _forget_oldest(folder)
            return True
        return False

    def entries(self) -> Sequence[tuple[str, LoadTrial]]:
        """Keys and load trials, the oldest first."""
        found: dict[str, LoadTrial] = {}
        for folder in self._folders():
            for path in _files(folder):
                trial = _read(path)
                if trial is not None:
                    found.setdefault(path.name, trial)
        return sorted(found.items(), key=lambda entry: entry[1].time)

    def forget(self, key: str) -> None:
        """Raises: OSError: it cannot be removed."""
        for folder in self._folders():
            (folder / key).unlink(missing_ok=True)

    def _folders(self) -> Sequence[Path]:
        return (self.directory,) if self.spare is None else (self.directory, self.spare)


def new_load_trial(
    outcome: Outcome,
    *,
    text: str = "",
    model: str,
    file: str,
    migraphx_version: str,
    inputs: Sequence[ProgramTensor] = (),
    outputs: Sequence[ProgramTensor] = (),
) -> LoadTrial:
    """A trial of now."""
    return LoadTrial(outcome, text, model, file, migraphx_version, time.time(), tuple(inputs), tuple(outputs))


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


def _replace(path: Path, content: bytes) -> None:
    new = path.with_name(f".{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def _forget_oldest(folder: Path) -> None:
    paths = _files(folder)
    if len(paths) <= _MOST:
        return
    with contextlib.suppress(OSError):
        for path in sorted(paths, key=lambda path: path.stat().st_mtime)[:-_MOST]:
            path.unlink(missing_ok=True)
