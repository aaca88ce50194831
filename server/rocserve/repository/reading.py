"""Reads what a model's folder says, outside the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from rocserve.backends.registry import BackendRegistry
from rocserve.config.definition import ModelDefinition, define_models, read_model_definitions
from rocserve.config.image_models import MadeModel
from rocserve.config.model_folder import ModelFolder
from rocserve.config.request_rules import ConfigRequest, RequestRefused
from rocserve.config.sources import WrittenConfig, read_written_config
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.repository.content import ModelContent, make_content
from rocserve.repository.load_parameters import LoadParameters
from rocserve.repository.private_folder import PrivateFolder, link_file, write_files
from rocserve.repository.scan import ModelScan, scan_model
from rocserve.settings import RepositorySettings

_AS_IN_REPOSITORY = LoadParameters()


@dataclass(frozen=True, slots=True)
class ContentReader:
    registry: BackendRegistry
    settings: RepositorySettings

    async def read(
        self, scan: ModelScan, parameters: LoadParameters = _AS_IN_REPOSITORY, *, name: str | None = None
    ) -> tuple[ModelContent, ...]:
        """The models of a folder. `name`: the model that `parameters` are for.

        Raises:
            ServeError: the folder must not be read, or what it says is wrong.
        """
        return await asyncio.to_thread(self._read, scan, parameters, name)

    async def read_given(
        self, written: WrittenConfig, name: str, file: Path | None, root: Path
    ) -> tuple[ModelContent, ...]:
        """A model that no folder of a repository defines: its configuration, and its file, which is in `root`.

        Raises:
            ServeError: the configuration is wrong.
        """
        return await asyncio.to_thread(self._read_given, written, name, file, root)

    async def read_made(self, made: Sequence[MadeModel], namespace: str) -> tuple[ModelContent, ...]:
        """Models that are made for another one, by the files of their folders.

        Raises:
            ServeError: they cannot be written, or what they say is wrong.
        """
        return await asyncio.to_thread(self._read_made, made, namespace)

    def _read_made(self, made: Sequence[MadeModel], namespace: str) -> tuple[ModelContent, ...]:
        contents: list[ModelContent] = []
        for model in made:
            private, scan = self._write(model.name, model.files)
            # Nothing in it is secret, and workers of another user read it.
            private.folder.parent.chmod(0o755)
            contents += self._define(replace(scan, namespace=namespace), private.folder, None, None, private)
        return tuple(contents)

    def _write(self, name: str, files: Mapping[PurePosixPath, bytes]) -> tuple[PrivateFolder, ModelScan]:
        private = write_files(name, files)
        allowed = (private.folder.resolve(),)
        return private, scan_model(name, private.folder, private.folder, allowed, self.settings.max_folder_entries)

    def _read_given(self, written: WrittenConfig, name: str, file: Path | None, root: Path) -> tuple[ModelContent, ...]:
        private = link_file(name, file)
        scan = scan_model(name, private.folder, root, (root,), self.settings.max_folder_entries)
        kind = self.settings.default_instance_kind
        definitions = define_models(written, private.folder, name, self.registry, kind, root)
        return tuple(make_content(definition, scan, private) for definition in definitions)

    def _read(self, scan: ModelScan, parameters: LoadParameters, name: str | None) -> tuple[ModelContent, ...]:
        if scan.refusal:
            raise invalid_argument(scan.refusal)
        if parameters.files:
            return self._read_given_files(scan, parameters, name or scan.name)
        if parameters.config is None:
            return self._define(scan, scan.folder, scan.root, None, None)
        return self._define(scan, scan.folder, scan.root, self._request(scan, parameters, name), None)

    def _read_given_files(self, scan: ModelScan, parameters: LoadParameters, name: str) -> tuple[ModelContent, ...]:
        request = self._request(scan, parameters, name)
        private, given = self._write(name, parameters.files)
        contents = self._define(given, private.folder, None, request, private)
        for content in contents:
            backend = content.definition.backend
            for mark in () if backend is None else backend.marks_of_programs:
                if any(mark in data for data in parameters.files.values()):
                    raise RequestRefused(
                        f"failed to load '{name}', a file in the request brings a compiled program ({mark.decode()});"
                        " such models are only loaded from the repository"
                    )
        return contents

    def _request(self, scan: ModelScan, parameters: LoadParameters, name: str | None) -> ConfigRequest:
        """The request's configuration beside what the repository says of the model."""
        request = ConfigRequest(parameters.config or "", brings_files=bool(parameters.files))
        if not scan.versions and not scan.config_files:
            return request
        try:
            contents = self._define(scan, scan.folder, scan.root, None, None)
        except ServeError:
            return request
        for content in contents:
            definition = content.definition
            if definition.name == (name or scan.name):
                backend = "" if definition.backend is None else definition.backend.name
                return replace(request, own=definition.message, own_backend=backend)
        return request

    def _define(
        self,
        scan: ModelScan,
        folder: Path,
        repository: Path | None,
        request: ConfigRequest | None,
        private: PrivateFolder | None,
    ) -> tuple[ModelContent, ...]:
        definitions = read_model_definitions(
            folder,
            self.registry,
            name=self._name(scan, request),
            config_name=self.settings.model_config_name,
            strict=self.settings.strict_model_config,
            request=request,
            default_instance_kind=self.settings.default_instance_kind,
            repository=repository,
            keep_refused=True,
            namespace=scan.namespace,
            flat=scan.flat,
            renames=self._is_named(scan),
            preprocess=self.settings.preprocess if self.settings.single is not None and scan.is_root else "",
        )
        return tuple(self._content(definition, scan, private) for definition in definitions)

    def _content(self, definition: ModelDefinition, scan: ModelScan, private: PrivateFolder | None) -> ModelContent:
        content = make_content(definition, scan, private)
        most = self.settings.max_versions
        if len(content.wanted) > most:
            raise invalid_argument(
                f"the version policy of model '{definition.name}' serves {len(content.wanted)} versions, at most {most}"
                " are possible; let it serve fewer, or raise --max-model-versions"
            )
        return content

    def _name(self, scan: ModelScan, request: ConfigRequest | None) -> str:
        """A repository that is itself a model is named by its configuration: how it was mounted says nothing. A name
        that was given goes before both."""
        if not scan.is_root or self._is_named(scan):
            return scan.name
        written = read_written_config(
            ModelFolder(scan.folder),
            scan.name,
            config_name=self.settings.model_config_name,
            strict=self.settings.strict_model_config,
            override_json=None if request is None else request.json,
            is_alone=scan.flat is not None and scan.flat.is_alone,
        )
        return written.models[0].message.name or scan.name

    def _is_named(self, scan: ModelScan) -> bool:
        single = self.settings.single
        return single is not None and single.is_named and scan.is_root
