"""Reads the content of a model's folder: its definition, files and versions. A load request may bring a
configuration and files that replace the repository's. Models whose files lie in no model folder get a private folder
of the server."""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from rocserve.backends.registry import BackendRegistry
from rocserve.cache.folders import make_folder
from rocserve.cache.temporary_folder import TemporaryFolder, remove_left
from rocserve.config.definition import FolderReading, ModelDefinition
from rocserve.config.model_folder import select_versions
from rocserve.config.preprocess.generated import GeneratedModel
from rocserve.config.request_rules import ConfigRequest, RequestRefused
from rocserve.config.written import WrittenConfig
from rocserve.core.errors import ServeError, internal, invalid_argument
from rocserve.core.model_names import ModelKey, qualified
from rocserve.core.printable import encodable, listed, shortened
from rocserve.protocol.model_config_pb2 import ModelConfig
from rocserve.repository.scan import ModelScan, scan_model
from rocserve.settings import RepositorySettings
from rocserve.settings.repository import WhatKind

VERSION = "version"
"""Parameter of requests that load or unload one version."""
UNLOAD_DEPENDENTS = "unload_dependents"
"""Parameter of requests that unload a model."""
_PRIVATE_PREFIX = "rocserve-model-"
_READABLE = 0o755


@dataclass(frozen=True, slots=True)
class LoadParameters:
    """What a client's load request gives in place of the repository's files."""

    config: str | None = None
    """A ModelConfig as JSON; None = the configuration in the repository."""
    files: Mapping[PurePosixPath, bytes] = field(default_factory=dict)
    """Path in the model's folder -> content. If there are any files, no file of the repository is used."""
    version: int | None = None
    """The version to load, in addition to those already wanted; None = those that the version policy selects."""


def parse_load_parameters(name: str, parameters: Mapping[str, bool | int | str | bytes]) -> LoadParameters:
    """Parse the parameters of a load request. Raises ServeError: INVALID_ARGUMENT for an unknown parameter, a wrong
    type or a forbidden path; INTERNAL for files without a configuration."""
    config: str | None = None
    files: dict[PurePosixPath, bytes] = {}
    version: int | None = None
    for key, value in parameters.items():
        if key == "config":
            if not isinstance(value, str):
                raise wrong_type(key, "string_param")
            config = value
        elif key == VERSION:
            version = parse_version(value)
        elif key.startswith("file:"):
            if not isinstance(value, bytes):
                raise wrong_type(key, "bytes_param")
            text = key.removeprefix("file:")
            is_path = all(part not in ("", ".", "..") for part in text.split("/")) and text == encodable(text)
            if not is_path or "\0" in text or "\\" in text:
                raise invalid_argument(
                    f"failed to load '{name}', load parameter '{key}' must be 'file:<version>/<path>', or another path"
                    " that stays in the model's folder"
                )
            files[PurePosixPath(text)] = value
        else:
            raise invalid_argument(f"unrecognized load parameter '{key}'.")
    if files and not config:
        raise internal(
            f"failed to load '{name}', failed to poll from model repository: files are given"
            f" ({listed(sorted(map(str, files)))}) without 'config'; add the configuration of these files"
        )
    return LoadParameters(config, files, version)


def parse_version(value: bool | int | str | bytes) -> int:
    """Read the parameter of a load or unload of one version. Raises ServeError (INVALID_ARGUMENT)."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if not isinstance(value, str) or not value.isascii() or not value.isdecimal() or len(value) > 18:
        shown = shortened(repr(value))
        raise invalid_argument(f"expected the number of a version as parameter '{VERSION}', got {shown}")
    return int(value)


IN_REPOSITORY = LoadParameters()


def wrong_type(key: str, expected: str) -> ServeError:
    return invalid_argument(f"invalid value type for load parameter '{key}', expected {expected}.")


class PrivateFolder:
    """Holds a temporary folder of the server and removes it when no reference to this object is left."""

    def __init__(self, name: str) -> None:
        """Blocks on the disk. Raises OSError."""
        temporary = TemporaryFolder(_PRIVATE_PREFIX)
        weakref.finalize(self, temporary.remove)
        # Workers of another user read the files. Nobody else can list this folder, so others need the model's name.
        temporary.path.chmod(0o711)
        self.folder = temporary.path / name
        make_folder(self.folder, _READABLE)


@dataclass(frozen=True, slots=True)
class ModelContent:
    """A model's folder at one moment: its definition, its files and the wanted versions."""

    definition: ModelDefinition
    scan: ModelScan
    wanted: frozenset[int]
    """Versions that the version policy selects."""
    shared_key: str
    """Digest of what all versions depend on: folder, files outside versions, configuration without version policy."""
    private_folder: PrivateFolder | None = None
    """Where the files lie if not in a repository; exists as long as this content."""

    @property
    def model(self) -> ModelKey:
        return qualified(self.scan.namespace, self.definition.name)

    def key(self, version: int) -> str:
        """Return a version's key; loads with equal keys load the same files and configuration."""
        return f"{self.shared_key} {version} {self.scan.versions[version].fingerprint}"


def make_content(
    definition: ModelDefinition, scan: ModelScan, private_folder: PrivateFolder | None = None
) -> ModelContent:
    # The digest is of the message, because a changed comment does not count and a request's configuration has no file.
    message = deepcopy(definition.message)
    message.ClearField("version_policy")
    digest = hashlib.blake2b(message.SerializeToString(deterministic=True), digest_size=16)
    digest.update(f"\0{scan.folder}\0{scan.other_files}".encode(errors="surrogateescape"))
    wanted = frozenset(select_versions(definition.config.version_policy, scan.versions))
    return ModelContent(definition, scan, wanted, digest.hexdigest(), private_folder)


@dataclass(frozen=True, slots=True)
class ContentReader:
    """Reads model folders. The methods block on the disk: call them in a thread."""

    registry: BackendRegistry
    settings: RepositorySettings

    def remove_left(self) -> None:
        """Remove private folders that killed servers have left."""
        remove_left(_PRIVATE_PREFIX)

    def read(
        self, scan: ModelScan, parameters: LoadParameters = IN_REPOSITORY, name: str | None = None
    ) -> tuple[ModelContent, ...]:
        """Read the models of a folder. `name`: the model that `parameters` belong to. Raises ServeError if the folder
        is refused or its configuration is wrong."""
        if scan.refusal:
            raise invalid_argument(scan.refusal)
        if parameters == IN_REPOSITORY:
            try:
                return self._define(scan)
            except ServeError as error:
                raise scan.advised(error) from None
        name = name or scan.name
        request = self._request(scan, parameters, name)
        if not parameters.files:
            return self._define(scan, request=request)
        contents = self._define(*self._write(name, parameters.files, namespace=scan.namespace), request)
        for content in contents:
            backend = content.definition.backend
            for mark in () if backend is None else backend.marks_of_programs:
                if any(mark in data for data in parameters.files.values()):
                    raise RequestRefused(
                        f"failed to load '{name}', a file in the request brings a compiled program ({mark.decode()});"
                        " such models are only loaded from the repository"
                    )
        return contents

    def written_ensemble(self, scan: ModelScan) -> ModelConfig | None:
        """Return the readable part of the configuration of an ensemble that cannot be used; None = its text cannot be
        read, or it belongs to another model."""
        if scan.refusal or (scan.is_root and self.settings.single is not None):
            return None
        reading = FolderReading(
            scan.folder, self.registry, scan.name, self.settings.model_config_name, repository=scan.root, flat=scan.flat
        )
        with contextlib.suppress(ServeError, OSError):
            for model in reading.written().models:
                for step in model.ensemble_scheduling.step:
                    step.model_namespace = scan.namespace
                if model.ensemble_scheduling.step:
                    return model
        return None

    def define(self, written: WrittenConfig, name: str, file: Path | None, root: Path) -> tuple[ModelContent, ...]:
        """Define a model outside of the repositories by its configuration and its `file` in `root` (None for an
        ensemble). Raises ServeError if the configuration is wrong."""
        version = PurePosixPath("1")
        scan, private = self._write(name, {version: None} if file is None else {version / file.name: file}, root)
        reading = FolderReading(private.folder, self.registry, name, repository=root)
        return tuple(make_content(definition, scan, private) for definition in reading.definitions(written))

    def read_generated(self, made: Sequence[GeneratedModel], namespace: str) -> tuple[ModelContent, ...]:
        """Define generated models from their files. Raises ServeError if they cannot be written or are wrong."""
        contents: list[ModelContent] = []
        for model in made:
            defined = self._define(*self._write(model.name, model.files, namespace=namespace))
            contents += [replace(one, definition=replace(one.definition, is_generated=True)) for one in defined]
        return tuple(contents)

    def _write(
        self,
        name: str,
        files: Mapping[PurePosixPath, bytes | Path | None],
        root: Path | None = None,
        namespace: str = "",
    ) -> tuple[ModelScan, PrivateFolder]:
        """Write a model's folder. A value is a file's content, a link's target in `root`, or None for an empty folder.
        Raises ServeError (INTERNAL) if the disk refuses."""
        try:
            private = PrivateFolder(name)
            for path, data in files.items():
                target = private.folder / path
                make_folder(target if data is None else target.parent, _READABLE)
                if isinstance(data, Path):
                    target.symlink_to(data)
                elif data is not None:
                    target.write_bytes(data)
                    target.chmod(0o644)
        except OSError as error:
            why = error.strerror or str(error)
            raise internal(
                f"failed to load '{name}', its files cannot be written to a temporary folder: {why}"
            ) from error
        root = root or private.folder
        scan = ModelScan(name, private.folder, root, namespace=namespace)
        return scan_model(scan, (root.resolve(),), self.settings.max_folder_entries), private

    def _request(self, scan: ModelScan, parameters: LoadParameters, name: str) -> ConfigRequest:
        """Combine the request's configuration with the repository's definition of the model, if there is one."""
        request = ConfigRequest(parameters.config or "", brings_files=bool(parameters.files))
        definitions: list[ModelDefinition] = []
        if scan.versions or scan.config_files:
            with contextlib.suppress(ServeError):
                definitions = [content.definition for content in self._define(scan)]
        for definition in definitions:
            if definition.name == name:
                backend = "" if definition.backend is None else definition.backend.name
                return replace(request, own=definition.message, own_backend=backend)
        return request

    def _define(
        self, scan: ModelScan, private: PrivateFolder | None = None, request: ConfigRequest | None = None
    ) -> tuple[ModelContent, ...]:
        single = self.settings.single if scan.is_root else None
        reading = FolderReading(
            scan.folder,
            self.registry,
            scan.name,
            config_name=self.settings.model_config_name,
            strict=self.settings.strict_model_config,
            request=request,
            repository=None if private else scan.root,
            namespace=scan.namespace,
            flat=scan.flat,
            renames=single is not None and single.is_named,
            preprocess=self.settings.preprocess if single is not None else "",
            labels=self.settings.labels if single is not None else None,
            guesses_preset=single is not None and single.kind is not WhatKind.FILE,
        )
        if scan.is_root and not reading.renames:
            # The folder's name depends on how the volume was mounted.
            own = replace(reading, repository=None).written().models[0].name
            reading = replace(reading, name=own or scan.name)
        most = self.settings.max_model_versions
        contents = [make_content(definition, scan, private) for definition in reading.definitions(keep_refused=True)]
        for content in contents:
            if (wanted := len(content.wanted)) > most:
                raise invalid_argument(
                    f"the version policy of model '{content.definition.name}' serves {wanted} versions, at most {most}"
                    " are possible; let it serve fewer, or raise --max-model-versions"
                )
        return tuple(contents)
