"""A model's folder as one reading of its configuration sees it, listed once; its versions; and the files that a
configuration names in it: labels, the states that sequences begin with, and those of repository agents
(model_repository_agents), of which there is one, Triton's `checksum`: its parameters name files and their digests.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath, PurePosixPath

from rocserve.config.bounds import MOST_LABEL_BYTES, MOST_LABELS, MOST_SAMPLE_BYTES
from rocserve.core.errors import internal, invalid_argument, unimplemented
from rocserve.core.model_config import ModelConfig as PlainConfig
from rocserve.core.model_config import VersionPolicy
from rocserve.core.printable import printable
from rocserve.protocol.model_config_pb2 import ModelConfig

_BESIDE = ("config.pbtxt", "labels.txt")
_HIGHEST = 2**63 - 1
_GET_WITH = "get_with"
"""The parameter by which a model that comes without its files names the command that fetches them."""


def is_version_name(name: str) -> bool:
    """Whether a folder of this name holds a version: digits only, no leading zero but "0" itself, at most 63 bits."""
    digits = name.isascii() and name.isdigit() and len(name) <= 19
    return digits and (name == "0" or not name.startswith("0")) and int(name) <= _HIGHEST


def select_versions(policy: VersionPolicy, available: Iterable[int]) -> tuple[int, ...]:
    """The versions that the policy serves, ascending. Specific ones that are not there are left out."""
    existing = sorted(set(available))
    if policy.specific is not None:
        return tuple(version for version in existing if version in policy.specific)
    return tuple(existing if policy.latest is None else existing[max(len(existing) - policy.latest, 0) :])


def no_version_text(config: PlainConfig) -> str:
    """The error of a model none of whose versions may be served, first in Triton's words."""
    text = f"at least one version must be available under the version policy of model '{config.name}'"
    command = config.parameters.get(_GET_WITH, "").strip()
    return f"{text}; get one with: {command}" if command else text


@dataclass(frozen=True, slots=True)
class FlatModel:
    """A model without version folders: its file lies directly in a folder, and is version 1."""

    file: str = ""
    """Its name; "" = one of those that the backends know their models by."""
    is_alone: bool = False
    """The folder is not the model's own, so that most of its files are none of the model: see `has`."""

    def has(self, name: str) -> bool:
        """Whether a file of the folder is the model's: all are of its own folder; else its file, those that are named
        after that (`resnet.onnx.data`, `resnet.onnx_data`, `resnet.bin` of `resnet.onnx`), its labels and its
        configuration."""
        if not self.is_alone or name in _BESIDE:
            return True
        return name.startswith((self.file, f"{PurePath(self.file).stem}."))

    def files(self, folder: Path) -> tuple[Path, ...]:
        """Those of the folder that are there."""
        return tuple(path for path in sorted(folder.iterdir()) if self.has(path.name) and is_so(path.is_file))


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
        return is_so((self.path / path).exists)


@dataclass(frozen=True, eq=False)
class ModelFolder:
    """Opens what a configuration names only within the model's folder, or the repository that it is in."""

    path: Path
    repository: Path | None = None
    """Links may lead to elsewhere in it; None: they stay in the model's folder."""

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
        """The file that `name` names, relative to the folder or one `below` it. It need not exist. Raises: ServeError:
        INVALID_ARGUMENT when the name is absolute, has `..` or a zero byte, or leads out by a link."""
        base = self.path / below
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or "\0" in name:
            raise invalid_argument(
                f"{what} '{printable(name)}' must be a path within the folder {base.name}, without '..' and not"
                " absolute"
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
        is_there = self.listing.has_file(name) if "/" not in name else is_so(path.is_file)
        return path if is_there else None

    @cached_property
    def _roots(self) -> tuple[Path, ...]:
        return tuple(root.resolve() for root in (self.path, self.repository) if root is not None)


def is_so(ask: Callable[[], bool]) -> bool:
    """What a path answers. A link to itself, or what lies where the server may not look, is neither a file nor a
    folder."""
    try:
        return ask()
    except OSError:
        return False


def read_labels(message: ModelConfig, folder: Path) -> dict[str, tuple[str, ...]]:
    """The labels of each output with a `label_filename`, which lies within the model's folder. Raises: ServeError:
    INVALID_ARGUMENT when the file leads out of the folder or is not UTF-8, INTERNAL when it is absent."""
    # Each file once: a thousand outputs may name the same million lines.
    labels: dict[str, tuple[str, ...]] = {}
    for output in message.output:
        name = output.label_filename
        if name and name not in labels:
            labels[name] = _read_lines(ModelFolder(folder), name, f"label file of output '{output.name}'")
    return {output.name: labels[output.label_filename] for output in message.output if output.label_filename}


def read_names(folder: ModelFolder, filename: str) -> tuple[str, ...]:
    """The lines of a label file that need not be there. Raises: ServeError: as `read_labels`."""
    return _read_lines(folder, filename, "label file") if folder.listing.has(filename) else ()


def _read_lines(folder: ModelFolder, filename: str, what: str) -> tuple[str, ...]:
    path = folder.resolve(filename, what)
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_LABEL_BYTES + 1)
    except OSError as error:
        raise internal(
            f"failed to open text file for read {path}: {error.strerror} ({what}; put it in the model's folder)"
        ) from None
    if len(raw) > MOST_LABEL_BYTES or raw.count(b"\n") > MOST_LABELS:
        raise invalid_argument(
            f"{what}: {filename} is larger than the {MOST_LABELS} lines and {MOST_LABEL_BYTES} bytes that a label file"
            " may have"
        )
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise invalid_argument(f"{what}: {filename} is not UTF-8 text") from None
    # Not splitlines: a label may hold any character but a line feed.
    lines = text.removesuffix("\n").split("\n") if text else []
    return tuple(line.removesuffix("\r") for line in lines)


CHECKSUM = "checksum"
_MD5 = "md5"


def check_agents_known(message: ModelConfig) -> None:
    """Raises: ServeError INVALID_ARGUMENT: there is no such agent."""
    for agent in message.model_repository_agents.agents:
        if agent.name != CHECKSUM:
            raise invalid_argument(
                f"unable to find 'libtritonrepoagent_{agent.name}.so' for repo agent '{agent.name}'; the only agent of"
                f" rocserve is '{CHECKSUM}': prepare the files of model '{message.name}' before they are dropped"
            )


def run_agents(message: ModelConfig, folder: ModelFolder) -> None:
    """Let the agents check the files of a model's folder. Raises: ServeError: INVALID_ARGUMENT in Triton's words: a
    file is not there or not what it should be; UNIMPLEMENTED: another kind of digest."""
    for agent in message.model_repository_agents.agents:
        for key, wanted in sorted(agent.parameters.items()):
            algorithm, colon, name = key.partition(":")
            if not colon:
                raise invalid_argument(f"failed to parse key: {key}; expected MD5:<path in the model's folder>")
            if algorithm.lower() != _MD5:
                raise unimplemented(f"Unsupported checksum algorithm: {algorithm}; expected MD5")
            path = folder.resolve(name, f"file of agent '{CHECKSUM}'")
            try:
                with path.open("rb") as file:
                    found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
            except OSError as error:
                raise invalid_argument(f"failed to open text file for read {name}: {error.strerror}") from None
            if found != wanted:
                raise invalid_argument(f"Mismatched MD5 hash for file {name}, expect: {wanted}, got: {found}")


INITIAL_STATE_FOLDER = "initial_state"


def read_initial_states(config: PlainConfig, folder: ModelFolder) -> Mapping[str, bytes]:
    """By the state's input name, what its `initial_state` names in the model's folder; none for zeros. Raises:
    ServeError: INVALID_ARGUMENT, a file is missing, elsewhere, or too short."""
    contents: dict[str, bytes] = {}
    states = () if config.sequence_batching is None else config.sequence_batching.states
    for state, initial in ((each, initial) for each in states for initial in each.initial_states):
        name = initial.data_file
        if not name:
            continue
        path = folder.resolve(name, f"initial state '{initial.name}'", INITIAL_STATE_FOLDER)
        expected = math.prod(initial.dims) * initial.datatype.itemsize
        try:
            with path.open("rb") as file:
                # Of strings, whose sizes vary, all.
                content = file.read(expected or MOST_SAMPLE_BYTES)
        except OSError as error:
            raise invalid_argument(
                f"the file '{name}' of initial state '{initial.name}' cannot be read in the model's folder"
                f" '{INITIAL_STATE_FOLDER}': {error.strerror}"
            ) from None
        if len(content) < expected:
            raise invalid_argument(
                f"initial_state setting expects {expected} bytes, but the data provided from {name}only has"
                f" {len(content)} bytes."
            )
        contents[state.input_name] = content
    return contents
