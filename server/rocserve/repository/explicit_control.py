"""Explicit mode: models are loaded and unloaded by request. Also loads all of them once, in mode none."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rocserve.config.request_rules import RequestRefused
from rocserve.core.errors import ServeError, internal
from rocserve.repository.content import ContentReader, LoadParameters, ModelContent, parse_load_parameters
from rocserve.repository.membership import members_of
from rocserve.repository.model import wait_for_loads
from rocserve.repository.remote.remote_repositories import RemoteRepositories
from rocserve.repository.retry import Failure
from rocserve.repository.scan import ModelScan
from rocserve.repository.scanner import RepositoryScan, RepositoryScanner
from rocserve.repository.table import ModelTable
from rocserve.repository.version import LifecycleContext
from rocserve.settings import RepositorySettings

ALL_MODELS = "*"
_ATTEMPTS = 5
"""How often a load begins anew because the model's files change under it."""
_IN_REPOSITORY = LoadParameters()


class ExplicitControl:
    """All calls are made on the loop's thread."""

    def __init__(
        self,
        settings: RepositorySettings,
        context: LifecycleContext,
        scanner: RepositoryScanner,
        reader: ContentReader,
        table: ModelTable,
        remotes: RemoteRepositories,
    ) -> None:
        self._settings = settings
        self._scanner = scanner
        self._reader = reader
        self._table = table
        self._models = table.models
        self._names = table.names
        self._remotes = remotes
        self._residents = context.residents
        self._background = context.background
        self._log = context.log
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def load_at_start(self, names: Iterable[str]) -> dict[str, str]:
        """Load these models, and all that are there for "*"; returns what could not be found, with the reason."""
        scan = await self._scanner.run()
        wanted: dict[str, None] = {}
        for name in names:
            found = [key for key, model in scan.models.items() if _is_meant(model)] if name == ALL_MODELS else []
            wanted |= dict.fromkeys(found if name == ALL_MODELS else self._keys(name, scan))
        for key, model in scan.models.items():
            for text in model.advice if key in wanted or ALL_MODELS in names else ():
                self._log.warning("%s", text)
        outcomes = await asyncio.gather(*(self._load_quietly(key, scan) for key in wanted))
        return {key: outcome for key, outcome in zip(wanted, outcomes, strict=True) if outcome}

    async def load(self, name: str, parameters: Mapping[str, bool | int | str | bytes]) -> None:
        """Load a model, and the members of an ensemble; goes on even if the caller is cancelled.

        Raises:
            ServeError: what Triton answers when the load fails; the index has more of the reason.
            RequestRefused: what the parameters ask for is not a client's to say.
        """
        parsed = parse_load_parameters(name, parameters)
        if parsed.files and not self._settings.allow_remote_files:
            raise RequestRefused(
                f"failed to load '{name}', files are not taken from requests; put them into the repository, or start"
                " the server with --allow-remote-files=true"
            )
        await asyncio.shield(self._background.start(self._load_checked(name, parsed), f"load request for {name}"))

    def unload(self, name: str, unload_dependents: bool) -> None:
        """Unload a model, and with `unload_dependents` the members of an ensemble that no other one needs."""
        for key in self._names.keys(name, self._models):
            self._unload(key, unload_dependents)

    def _unload(self, key: str, unload_dependents: bool) -> None:
        model = self._models.get(key)
        if model is None:
            return
        config = model.config
        model.remove(is_gone=False)
        if unload_dependents and config is not None:
            for member in members_of(config):
                if not self._is_needed(member):
                    self._unload(member, unload_dependents)

    def _keys(self, name: str, scan: RepositoryScan) -> Sequence[str]:
        """The models of a name, of each repository where those are namespaces; the name itself where there is none."""
        if not self._names.namespaces:
            return (name,)
        return self._names.keys(name, dict.fromkeys((*scan.models, *self._models))) or (name,)

    async def _load_quietly(self, key: str, scan: RepositoryScan) -> str:
        """Load as the server starts; returns the reason when there is nothing to load."""
        try:
            await self._load(key, _IN_REPOSITORY, scan, frozenset())
        except ServeError as error:
            return "" if key in self._models else error.text
        return ""

    async def _load_checked(self, name: str, parameters: LoadParameters) -> None:
        if not name or "/" in name or "\0" in name or name in (".", ".."):
            raise _not_polled(name)
        await self._remotes.take({name})
        # All others are as they were scanned last: what has changed of those that are loaded too is found by the load.
        owners = (self._table.folder_of(key) for key in self._names.keys(name, self._models))
        folders = {name, *(self._names.bare(owner) for owner in owners if owner is not None)}
        roots = [root.absolute() for root in self._settings.roots]
        scan = await self._scanner.run([root / folder for root in roots for folder in folders])
        for key in self._keys(name, scan):
            await self._load(key, parameters, scan, frozenset())
            served = self._models[key].served_model()
            if served is not None and self._residents is not None:
                for version in served.versions.values():
                    await self._residents.bring(version)

    async def _load(self, key: str, parameters: LoadParameters, scan: RepositoryScan, above: frozenset[str]) -> None:
        """Raises: ServeError."""
        name = self._names.bare(key)
        folder = await self._find_folder(key, parameters, scan)
        contents = await self._read(name, folder, parameters)
        await self._load_members(contents, scan, above | {key})
        async with self._locks[folder.key]:
            await self._apply(key, folder, contents, parameters)
        model = next((self._models[each.model] for each in contents if each.definition.name == name), None)
        error = _not_polled(name) if model is None else model.load_error()
        try:
            if error is not None:
                raise error
        finally:
            # Its traceback holds this frame, and through it the files that a request may have brought.
            del error

    async def _apply(
        self, key: str, folder: ModelScan, contents: Sequence[ModelContent], parameters: LoadParameters
    ) -> None:
        """Let the models become this and wait until their loads have ended, over again when files change meanwhile."""
        for _ in range(_ATTEMPTS):
            self._table.take(folder.key, contents, at_once=True)
            models = [self._models[content.model] for content in contents]
            await wait_for_loads(models)
            if not any(model.waits_for_files for model in models):
                return
            await asyncio.sleep(self._settings.settle_seconds)
            folder = await self._find_folder(key, parameters, await self._scanner.run())
            contents = await self._read(self._names.bare(key), folder, parameters)
        for model in models:
            model.stop_loading()

    async def _find_folder(self, key: str, parameters: LoadParameters, scan: RepositoryScan) -> ModelScan:
        folder = scan.models.get(self._table.folder_of(key) or key)
        if folder is not None:
            return folder
        name = self._names.bare(key)
        for candidate in scan.models.values():
            if candidate.is_root and not parameters.config and await self._defines(candidate, name):
                return candidate
        if parameters.files and not self._settings.allow_remote_models:
            raise RequestRefused(
                f"failed to load '{name}', there is no such model in the repository; start the server with"
                " --allow-remote-models=true to have requests bring models of their own"
            )
        if parameters.files:
            return ModelScan(name, Path(name), Path(name), "", "", {})
        self._log.error("failed to load '%s': there is no folder of that name in the model repositories", name)
        raise _not_polled(name)

    async def _defines(self, folder: ModelScan, name: str) -> bool:
        try:
            contents = await asyncio.to_thread(self._reader.read, folder)
        except ServeError:
            return False
        return any(content.definition.name == name for content in contents)

    async def _read(self, name: str, folder: ModelScan, parameters: LoadParameters) -> tuple[ModelContent, ...]:
        try:
            return await asyncio.to_thread(self._reader.read, folder, parameters, name)
        except RequestRefused:
            raise
        except ServeError as error:
            self._table.reject(folder.key, Failure(error, "", 1, None))
            if parameters.files and not parameters.config:
                raise
            raise _not_polled(name) from error

    async def _load_members(
        self, contents: Sequence[ModelContent], scan: RepositoryScan, above: frozenset[str]
    ) -> None:
        """Load the members of ensembles that are not served yet. A failure shows at the ensemble."""
        own = {content.model for content in contents}
        members = {member for content in contents for member in members_of(content.definition.config)}
        lacking = {self._names.bare(member) for member in members if not self._is_serving(member)}
        if lacking and await self._remotes.take(lacking):
            scan = await self._scanner.run()
        needed = {key for member in members for key in self._keys(self._names.bare(member), scan)}
        keys = sorted(key for key in needed - own - above if not self._is_serving(key))
        outcomes = await asyncio.gather(
            *(self._load(key, _IN_REPOSITORY, scan, above) for key in keys), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, ServeError):
                self._log.error("a member could not be loaded: %s", outcome.text)
            elif isinstance(outcome, BaseException):
                raise outcome

    def _is_serving(self, name: str) -> bool:
        model = self._models.get(name)
        return model is not None and model.is_serving

    def _is_needed(self, name: str) -> bool:
        """Whether a loaded ensemble has this member."""
        configs = (model.config for model in self._models.values())
        return any(name in members_of(config) for config in configs if config is not None)


def _is_meant(model: ModelScan) -> bool:
    return model.looks_like_model or bool(model.refusal)


def _not_polled(name: str) -> ServeError:
    return internal(f"failed to load '{name}', failed to poll from model repository")
