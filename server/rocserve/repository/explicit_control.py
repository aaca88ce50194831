"""Explicit control: loads and unloads models by request. In mode none, also loads all models once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakValueDictionary

from rocserve.config.request_rules import RequestRefused
from rocserve.core.errors import ServeError, internal, invalid_argument
from rocserve.core.model_names import ModelKey
from rocserve.core.printable import listed, shortened
from rocserve.repository.content import IN_REPOSITORY, LoadParameters, ModelContent, parse_load_parameters
from rocserve.repository.context import RepositoryContext
from rocserve.repository.ensemble_members import innermost_first, members_of
from rocserve.repository.model import ManagedModel, wait_for_loads
from rocserve.repository.remote.remote_repositories import RemoteRepositories
from rocserve.repository.retries import Failure
from rocserve.repository.scan import ModelScan
from rocserve.repository.scanner import RepositoryScan
from rocserve.repository.table import ModelTable

ALL_MODELS = "*"


@dataclass(frozen=True, slots=True)
class _FolderContents:
    """The contents of a folder, combined with the load request's parameters."""

    folder: ModelScan
    contents: Sequence[ModelContent]
    parameters: LoadParameters

    @property
    def members(self) -> Set[ModelKey]:
        """The keys of the ensembles' members that other folders define."""
        members = {member for content in self.contents for member in members_of(content.definition.config)}
        return members - {content.model for content in self.contents}


class ExplicitControl:
    """Loads and unloads models by request. All calls are made on the loop's thread."""

    def __init__(self, context: RepositoryContext, table: ModelTable, remotes: RemoteRepositories) -> None:
        self._context = context
        self._table = table
        self._models = table.models
        self._names = table.names
        self._remotes = remotes
        self._locks: WeakValueDictionary[ModelKey, asyncio.Lock] = WeakValueDictionary()
        """Folder's key -> lock, which is held while the folder's models load."""

    async def load_at_start(self, names: Iterable[str]) -> dict[str, str]:
        """Load these models; "*" = all that exist. Returns the reason for each model that was not found."""
        scan = await self._context.scanner.run()
        wanted: dict[ModelKey, None] = {}
        for name in names:
            folders = scan.models.items()
            every = (key for key, model in folders if model.looks_like_model or model.refusal)
            wanted |= dict.fromkeys(every if name == ALL_MODELS else self._keys(name, scan))
        for key, model in scan.models.items():
            for text in model.advice if key in wanted or ALL_MODELS in names else ():
                self._context.log.warning("%s", text)
        missing: dict[str, str] = {}

        async def load(key: ModelKey) -> None:
            try:
                await self._load(key, IN_REPOSITORY, scan)
            except ServeError as error:
                if key not in self._models:
                    missing[key] = error.text

        await asyncio.gather(*map(load, wanted))
        return missing

    async def load(self, name: str, parameters: Mapping[str, bool | int | str | bytes]) -> None:
        """Load a model and an ensemble's members. The load goes on if the caller is cancelled. Raises ServeError in
        Triton's words (the index has more details); RequestRefused if clients may not use these parameters."""
        parsed = parse_load_parameters(name, parameters)
        if parsed.files and not self._context.settings.allow_remote_files:
            raise RequestRefused(
                f"failed to load '{name}', files in requests are refused; put them into the repository, or start"
                " the server with --allow-remote-files=true"
            )
        await asyncio.shield(
            self._context.background.start(self._load_checked(name, parsed), f"load request for {name}")
        )

    def unload_version(self, name: str, number: int) -> None:
        """Unload one version of a model, and the model with its last version. Ignores versions that are not loaded."""
        for key in self._names.keys(name, self._models):
            model = self._models[key]
            model.unwant(number)
            if model.content is not None and not model.content.wanted:
                self._table.unload(model)

    def unload(self, name: str, unload_dependents: bool) -> None:
        """Unload a model; with `unload_dependents` also an ensemble's members that no other ensemble needs."""
        models = [self._models[key] for key in self._names.keys(name, self._models)]
        while models:
            model = models.pop()
            members = self._table.members(model)
            self._table.unload(model)
            if unload_dependents:
                needed = {member for model in self._models.values() for member in self._table.members(model)}
                models += members - needed

    def _keys(self, name: str, scan: RepositoryScan) -> Sequence[ModelKey]:
        """Return the keys of a name: one for each repository if repositories are namespaces, else the name itself."""
        if not self._names.namespaces:
            return (ModelKey(name),)
        return self._names.keys(name, dict.fromkeys((*scan.models, *self._models))) or (ModelKey(name),)

    async def _load_checked(self, name: str, parameters: LoadParameters) -> None:
        if not name or "/" in name or "\0" in name or name in (".", ".."):
            raise _not_polled(name)
        await self._remotes.take({name})
        # All other folders keep their last scan. If a loaded file has changed, the load itself notices.
        owners = (self._table.folder_of(key) for key in self._names.keys(name, self._models))
        folders = {name, *(self._names.bare(owner) for owner in owners if owner is not None)}
        scanner = self._context.scanner
        scan = await scanner.run([root / folder for root in scanner.roots for folder in folders])
        for key in self._keys(name, scan):
            served = (await self._load(key, parameters, scan)).served_model()
            for version in () if served is None else served.versions.values():
                await version.ensure_loaded()

    async def _load(self, key: ModelKey, parameters: LoadParameters, scan: RepositoryScan) -> ManagedModel:
        """Load a model, and first the members of an ensemble, at any depth, that do not serve. Members load at the same
        time unless one contains the other. A failed member is reported through its ensemble. Raises ServeError."""
        readings, members = await self._read_with_members(key, parameters, scan)
        loads: dict[ModelKey, asyncio.Task[ManagedModel]] = {}
        for needed in innermost_first(members):
            before = [loads[member] for member in members[needed] if member in loads]
            loads[needed] = asyncio.create_task(self._load_alone(needed, readings[needed], before))
        # Cancels all loads if it is cancelled.
        await asyncio.gather(*loads.values(), return_exceptions=True)
        for error in [load.exception() for needed, load in loads.items() if needed != key and not load.cancelled()]:
            if error is not None:
                self._log_failure(error)
        # Popped, and in no variable, because the error's traceback holds this frame, and so the files of a request.
        return await loads.pop(key)

    async def _read_with_members(
        self, key: ModelKey, parameters: LoadParameters, scan: RepositoryScan
    ) -> tuple[Mapping[ModelKey, _FolderContents], Mapping[ModelKey, Set[ModelKey]]]:
        """Read the folders of a model and of all models to load with it. Returns the readings, and the members of each
        that do not serve, even if no folder defines them. Unreadable members are logged. Raises ServeError if the model
        itself cannot be read."""
        readings = {key: await self._read(key, parameters, scan)}
        members: dict[ModelKey, Set[ModelKey]] = {}
        tried = {key}
        level = [key]
        while level:
            lacking = [member for one in level for member in readings[one].members if not self._is_serving(member)]
            if lacking and await self._remotes.take({self._names.bare(member) for member in lacking}):
                scan = await self._context.scanner.run()
            for one in level:
                # With namespaces a member's name is looked up in every repository, as in Triton.
                found = (key for member in readings[one].members for key in self._keys(self._names.bare(member), scan))
                members[one] = {key for key in found if not self._is_serving(key)}
            new = sorted(set().union(*(members[one] for one in level)) - tried)
            tried.update(new)
            level = []
            works = (self._read(one, IN_REPOSITORY, scan) for one in new)
            for one, outcome in zip(new, await asyncio.gather(*works, return_exceptions=True), strict=True):
                if isinstance(outcome, _FolderContents):
                    readings[one] = outcome
                    level.append(one)
                else:
                    self._log_failure(outcome)
        return readings, members

    def _log_failure(self, error: BaseException) -> None:
        if not isinstance(error, ServeError):
            raise error
        self._context.log.error("a member could not be loaded: %s", error.text)

    async def _load_alone(
        self, key: ModelKey, reading: _FolderContents, before: Collection[asyncio.Task[ManagedModel]]
    ) -> ManagedModel:
        """Load the models of a folder after the tasks `before`. Starts again if files change meanwhile. Raises
        ServeError if the model of this key is not loaded."""
        if before:
            await asyncio.wait(before)
        models: list[ManagedModel] = []
        folder_key = reading.folder.key
        lock = self._locks.setdefault(folder_key, asyncio.Lock())
        async with lock:
            try:
                # Files that keep changing end the load.
                for _ in range(5):
                    self._table.apply(folder_key, reading.contents, retries_failed=True)
                    models = [self._models[content.model] for content in reading.contents]
                    await wait_for_loads(models)
                    if not any(model.waits_for_files for model in models):
                        break
                    await asyncio.sleep(self._context.settings.settle_seconds)
                    reading = await self._read(key, reading.parameters, await self._context.scanner.run())
            finally:
                # A folder that is gone or keeps changing is not loaded again.
                for model in models:
                    if model.has_running_loads:
                        model.stop_loading()
                        model.publish()
        name = self._names.bare(key)
        own = [self._models[content.model] for content in reading.contents if content.definition.name == name]
        if not own:
            raise _not_polled(name)
        own[0].check_loaded(reading.parameters.version)
        return own[0]

    async def _find_folder(self, key: ModelKey, parameters: LoadParameters, scan: RepositoryScan) -> ModelScan:
        folder = scan.models.get(self._table.folder_of(key) or key)
        if folder is not None:
            return folder
        name = self._names.bare(key)
        for candidate in scan.models.values():
            if candidate.is_root and not parameters.config:
                with contextlib.suppress(ServeError):
                    contents = await asyncio.to_thread(self._context.reader.read, candidate)
                    if any(content.definition.name == name for content in contents):
                        return candidate
        if parameters.files and not self._context.settings.allow_remote_models:
            raise RequestRefused(
                f"failed to load '{name}', there is no such model in the repository; start the server with"
                " --allow-remote-models=true to accept models in load requests"
            )
        if parameters.files:
            return ModelScan(name, Path(name), Path(name))
        shown = shortened(name)
        self._context.log.error("failed to load '%s': there is no folder of that name in the model repositories", shown)
        raise _not_polled(name)

    async def _read(self, key: ModelKey, parameters: LoadParameters, scan: RepositoryScan) -> _FolderContents:
        name = self._names.bare(key)
        folder = await self._find_folder(key, parameters, scan)
        try:
            of_all = replace(parameters, version=None)
            contents = await asyncio.to_thread(self._context.reader.read, folder, of_all, name)
        except RequestRefused:
            raise
        except ServeError as error:
            self._table.reject(folder.key, Failure(error))
            raise _not_polled(name) from error
        if parameters.version is not None:
            number = parameters.version
            contents = tuple(
                self._with_version(content, number) if content.definition.name == name else content
                for content in contents
            )
        return _FolderContents(folder, contents, parameters)

    def _with_version(self, content: ModelContent, number: int) -> ModelContent:
        """Return content that wants this version too, next to those that are wanted now. Raises ServeError if the
        folder has no such version, or too many are wanted."""
        name, versions = content.definition.name, content.scan.versions
        if number not in versions:
            found = listed([str(version) for version in sorted(versions)]) or "none"
            raise invalid_argument(f"failed to load '{name}', it has no version {number}; its versions are: {found}")
        model = self._models.get(content.model)
        now = frozenset[int]() if model is None or model.content is None else model.content.wanted
        wanted, most = (now & versions.keys()) | {number}, self._context.settings.max_model_versions
        if len(wanted) > most:
            raise invalid_argument(
                f"failed to load '{name}', {len(wanted)} of its versions would be served, at most {most} are possible;"
                " unload one of them, or raise --max-model-versions"
            )
        return replace(content, wanted=wanted)

    def _is_serving(self, key: ModelKey) -> bool:
        model = self._models.get(key)
        return model is not None and model.is_serving


def _not_polled(name: str) -> ServeError:
    return internal(f"failed to load '{name}', failed to poll from model repository")
