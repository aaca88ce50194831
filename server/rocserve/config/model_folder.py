"""A model's folder: lists it once per reading, selects its versions, and reads the files that its configuration names:
labels, initial states of sequences, and files of repository agents. The only agent is Triton's `checksum`, whose
parameters name files and their digests."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath, PurePosixPath

from rocserve.config.bounds import MOST_LABEL_BYTES, MOST_LABELS, MOST_SAMPLE_BYTES
from rocserve.core.errors import internal, invalid_argument, unimplemented, unreadable
from rocserve.core.load_check import RECORDED_FILE
from rocserve.core.model_config import ModelConfig as PlainConfig
from rocserve.core.model_config import VersionPolicy
from rocserve.core.printable import printable
from rocserve.core.serving import LARGEST_VERSION
from rocserve.protocol.model_config_pb2 import ModelConfig

CONFIG_FILENAME = "config.pbtxt"
TOML_FILENAME = "config.toml"
CONFIGS_FOLDER = "configs"
"""Folder of the configurations for --model-config-name."""
LABELS_FILENAME = "labels.txt"
"""Class names, one per line, in the folder of a model, and of its generated post-processing."""


def is_version_name(name: str) -> bool:
    """Whether a folder of this name holds a version: digits only, at most 63 bits, no leading zero except for "0"."""
    has_digits = name.isascii() and name.isdigit() and len(name) <= 19
    return has_digits and name == str(int(name)) and int(name) <= LARGEST_VERSION


def select_versions(policy: VersionPolicy, available: Iterable[int]) -> tuple[int, ...]:
    """Return the versions that the policy serves, ascending. Missing specific versions are left out."""
    existing = sorted(set(available))
    if policy.specific is not None:
        return tuple(version for version in existing if version in policy.specific)
    return tuple(existing if policy.latest is None else existing[max(len(existing) - policy.latest, 0) :])


def no_version_text(config: PlainConfig) -> str:
    """Return the error of a model without any version to serve; it begins with Triton's words."""
    text = f"at least one version must be available under the version policy of model '{config.name}'"
    # The command that fetches the model's missing files.
    command = config.parameters.get("get_with", "").strip()
    return f"{text}; get one with: {command}" if command else text


@dataclass(frozen=True, slots=True)
class FlatModel:
    """A model without version folders: its file lies directly in a folder and is version 1."""

    file: str = ""
    """Name of the model's file; "" = the file with a backend's file name."""
    is_alone: bool = False
    """The folder is not the model's own, so `has` chooses the model's files."""

    def has(self, name: str) -> bool:
        """Whether a file of the folder is the model's. In the model's own folder all are; else the model's file, files
        named after it (`resnet.onnx.data`, `resnet.onnx_data`, `resnet.bin` for `resnet.onnx`), labels,
        configuration and recorded answers."""
        files_of_each_model = (
            CONFIG_FILENAME,
            LABELS_FILENAME,
            RECORDED_FILE,
            *("tokenizer.json", "tokenizer_config.json", "config.json", "sentence_bert_config.json", "modules.json"),
        )
        if not self.is_alone or name in files_of_each_model:
            return True
        return name.startswith((self.file, f"{PurePath(self.file).stem}."))

    def files(self, folder: Path) -> tuple[Path, ...]:
        """Return the model's files in the folder."""
        return tuple(path for path in sorted(folder.iterdir()) if self.has(path.name) and is_true(path.is_file))


class Listing:
    """The files and folders in a folder at one moment; none if the folder cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: Mapping[str, os.DirEntry[str]] = {}
        self.error = ""
        """Why the folder could not be read; "" = it could."""
        try:
            with os.scandir(path) as entries:
                self.entries = {entry.name: entry for entry in entries}
        except OSError as error:
            self.error = error.strerror or str(error)

    @property
    def visible(self) -> list[str]:
        """The names that may be a model's; recorded answers are never the model."""
        return sorted(name for name in self.entries if not name.startswith(".") and name != RECORDED_FILE)

    @property
    def folders(self) -> list[str]:
        return sorted(entry.name for entry in self.entries.values() if is_true(entry.is_dir))

    def has_file(self, name: str) -> bool:
        return (entry := self.entries.get(name)) is not None and is_true(entry.is_file)

    def has(self, path: str) -> bool:
        """Whether a file or folder exists at this relative path; a broken link does not count."""
        if "/" not in path:
            entry = self.entries.get(path)
            if entry is None or not entry.is_symlink():
                return entry is not None
        return is_true((self.path / path).exists)


@dataclass(frozen=True, eq=False)
class ModelFolder:
    """Resolves names in a configuration to files in the model's folder or its repository only."""

    path: Path
    repository: Path | None = None
    """Links may lead into this folder; None = only into the model's folder."""

    @cached_property
    def listing(self) -> Listing:
        return Listing(self.path)

    @cached_property
    def versions(self) -> tuple[int, ...]:
        """Versions in ascending order."""
        return tuple(sorted(int(name) for name in self.listing.folders if is_version_name(name)))

    @cached_property
    def places(self) -> tuple[Listing, ...]:
        """Folders that may hold the model's file: the version folders, highest first; without any, the model's folder
        itself (a model mounted without versions)."""
        return tuple(Listing(self.path / str(version)) for version in reversed(self.versions)) or (self.listing,)

    @property
    def ignored_versions(self) -> tuple[str, ...]:
        """Triton's warnings about folders that would be versions without their leading zeros."""
        return tuple(
            f"ignore version directory '{name}' which contains leading zeros in its directory name"
            for name in self.listing.folders
            if len(name) > 1 and name.startswith("0") and name.isascii() and name.isdigit()
        )

    def resolve(self, name: str, what: str, below: str = "") -> Path:
        """Return the path of `name`, relative to the folder or its subfolder `below`. The file need not exist. Raises
        ServeError (INVALID_ARGUMENT) if the name is absolute, has `..` or a zero byte, or is a link that leads out."""
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
            raise invalid_argument(f"{what} '{name}' is a broken link") from None
        if not any(target.is_relative_to(root) for root in self._roots):
            raise invalid_argument(f"{what} '{name}' is a link that leads out of the model repository, to {target}")
        return path

    def find(self, name: str, what: str) -> Path | None:
        """Return the path of an existing file, as `resolve` does; None = no such file."""
        path = self.resolve(name, what)
        is_there = self.listing.has_file(name) if "/" not in name else is_true(path.is_file)
        return path if is_there else None

    def recorded_answers(self, version_folder: Path) -> Path | None:
        """Return the file of recorded answers: the version's, else the model's; None = no such file. Raises as
        `resolve`."""
        below = version_folder.name if version_folder != self.path else ""
        for folder in dict.fromkeys((below, "")):
            path = self.resolve(RECORDED_FILE, "recorded answers", folder)
            if is_true(path.is_file):
                return path
        return None

    @cached_property
    def _roots(self) -> tuple[Path, ...]:
        return tuple(root.resolve() for root in (self.path, self.repository) if root is not None)


def is_true(ask: Callable[[], bool]) -> bool:
    """Return the answer of a query about a path; False if the path is a link to itself or unreadable."""
    try:
        return ask()
    except OSError:
        return False


def read_labels(message: ModelConfig, folder: Path) -> dict[str, tuple[str, ...]]:
    """Read the labels of each output with a `label_filename`. The file must lie in the model's folder. Raises
    ServeError: INVALID_ARGUMENT if it leads out of the folder, is too large or not UTF-8; INTERNAL if it is missing."""
    # Each file is read once, because a thousand outputs may share a million lines.
    labels: dict[str, tuple[str, ...]] = {}
    for output in message.output:
        name = output.label_filename
        if name and name not in labels:
            labels[name] = _read_lines(ModelFolder(folder), name, f"label file of output '{output.name}'")
    return {output.name: labels[output.label_filename] for output in message.output if output.label_filename}


def read_names(folder: ModelFolder, filename: str) -> tuple[str, ...]:
    """Read the lines of a label file; empty if the file does not exist. Raises as `read_labels`."""
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


def check_agents_known(message: ModelConfig) -> None:
    """Raise ServeError (INVALID_ARGUMENT) for an unknown agent."""
    for agent in message.model_repository_agents.agents:
        if agent.name != CHECKSUM:
            raise invalid_argument(
                f"unable to find 'libtritonrepoagent_{agent.name}.so' for repo agent '{agent.name}'; the only agent of"
                f" rocserve is '{CHECKSUM}': prepare the files of model '{message.name}' before you drop them"
            )


def run_agents(message: ModelConfig, folder: ModelFolder) -> None:
    """Let the agents check the files of a model's folder. Raises ServeError in Triton's words: INVALID_ARGUMENT for a
    missing or different file; UNIMPLEMENTED for another kind of digest."""
    for agent in message.model_repository_agents.agents:
        for key, wanted in sorted(agent.parameters.items()):
            algorithm, colon, name = key.partition(":")
            if not colon:
                raise invalid_argument(f"failed to parse key: {key}; expected MD5:<path in the model's folder>")
            if algorithm.lower() != "md5":
                raise unimplemented(f"Unsupported checksum algorithm: {algorithm}; expected MD5")
            path = folder.resolve(name, f"file of agent '{CHECKSUM}'")
            try:
                with path.open("rb") as file:
                    found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
            except OSError as error:
                raise unreadable(f"failed to open text file for read {name}: {error.strerror}", error) from None
            if found != wanted:
                raise invalid_argument(f"Mismatched MD5 hash for file {name}, expect: {wanted}, got: {found}")


def read_initial_states(config: PlainConfig, folder: ModelFolder) -> Mapping[str, bytes]:
    """Read the files of `initial_state`. Returns input name of the state -> content, without states of zeros. Raises
    ServeError (INVALID_ARGUMENT) if a file is missing, outside of the folder, or too short."""
    contents: dict[str, bytes] = {}
    states = () if config.sequence_batching is None else config.sequence_batching.states
    for state, initial in ((owner, initial) for owner in states for initial in owner.initial_states):
        name = initial.data_file
        if not name:
            continue
        path = folder.resolve(name, f"initial state '{initial.name}'", "initial_state")
        expected = math.prod(initial.dims) * initial.datatype.itemsize
        try:
            with path.open("rb") as file:
                # Strings have no fixed size, so the whole file is read.
                content = file.read(expected or MOST_SAMPLE_BYTES)
        except OSError as error:
            raise unreadable(
                f"the file '{name}' of initial state '{initial.name}' cannot be read in the model's folder"
                f" 'initial_state': {error.strerror}",
                error,
            ) from None
        if len(content) < expected:
            raise invalid_argument(
                f"initial_state setting expects {expected} bytes, but the data provided from {name}only has"
                f" {len(content)} bytes."
            )
        contents[state.input_name] = content
    return contents
