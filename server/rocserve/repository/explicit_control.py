"""Explicit mode: models are loaded and unloaded by request. Also loads all of them once, in mode none."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rocserve.config.request_rules import RequestRefused
from rocserve.core.errors import ServeError, internal
from rocserve.repository.content import IN_REPOSITORY, LoadParameters, ModelContent, parse_load_parameters
from rocserve.repository.lifecycle import Failure, LifecycleContext
from rocserve.repository.membership import members_of
from rocserve.repository.model import wait_for_loads
from rocserve.repository.remote.remote_repositories import RemoteRepositories
from rocserve.repository.scan import ModelScan
from rocserve.repository.scanner import RepositoryScan
from rocserve.repository.table import ModelTable

ALL_MODELS = "*"
_ATTEMPTS = 5
"""How often a load begins anew because the model's files change under it."""


class ExplicitControl:
    """All calls are made on the loop's thread."""

    def __init__(self, context: LifecycleContext, table: ModelTable, remotes: RemoteRepositories) -> None:
        self._context = context
        self._table = table
        self._models = table.models
        self._names = table.names
        self._remotes = remotes
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def load_at_start(self, names: Iterable[str]) -> dict[str, str]:
        """Load these models, and all that are there for "*"; returns what could not be found, with the reason."""
        scan = await self._context.scanner.run()
        wanted: dict[str, None] = {}
        for name in names:
            folders = scan.models.items()
            every = (key for key, model in folders if model.looks_like_model or model.refusal)
            wanted |= dict.fromkeys(every if name == ALL_MODELS else self._keys(name, scan))
        for key, model in scan.models.items():
            for text in model.advice if key in wanted or ALL_MODELS in names else ():
                self._context.log.warning("%s", text)
        failures = await self._load_all(wanted, scan, frozenset())
        return {key: error.text for key, error in failures.items() if key not in self._models}

    async def load(self, name: str, parameters: Mapping[str, bool | int | str | bytes]) -> None:
        """Load a model, and the members of an ensemble; goes on even if the caller is cancelled. Raises: ServeError:
        what Triton answers when the load fails; the index has more of the reason; RequestRefused: what the parameters
        ask for is not a client's to say."""
        parsed = parse_load_parameters(name, parameters)
        if parsed.files and not self._context.settings.allow_remote_files:
            raise RequestRefused(
                f"failed to load '{name}', files are not taken from requests; put them into the repository, or start"
                " the server with --allow-remote-files=true"
            )
        await asyncio.shield(
            self._context.background.start(self._load_checked(name, parsed), f"load request for {name}")
        )

    def unload(self, name: str, unload_dependents: bool) -> None:
        """Unload a model, and with `unload_dependents` the members of an ensemble that no other one needs."""
        keys = self._names.keys(name, self._models)
        while keys:
            model = self._models.get(keys.pop())
            if model is None:
                continue
            config = model.config
            model.remove()
            if unload_dependents and config is not None:
                loaded = (each.config for each in self._models.values())
                needed = {member for each in loaded if each is not None for member in members_of(each)}
                keys += [member for member in members_of(config) if member not in needed]

    def _keys(self, name: str, scan: RepositoryScan) -> Sequence[str]:
        """The models of a name, of each repository where those are namespaces; the name itself where there is none."""
        if not self._names.namespaces:
            return (name,)
        return self._names.keys(name, dict.fromkeys((*scan.models, *self._models))) or (name,)

    async def _load_checked(self, name: str, parameters: LoadParameters) -> None:
        if not name or "/" in name or "\0" in name or name in (".", ".."):
            raise _not_polled(name)
        await self._remotes.take({name})
        # All others are as they were scanned last: what has changed of those that are loaded too is found by the load.
        owners = (self._table.folder_of(key) for key in self._names.keys(name, self._models))
        folders = {name, *(self._names.bare(owner) for owner in owners if owner is not None)}
        scanner = self._context.scanner
        scan = await scanner.run([root / folder for root in scanner.roots for folder in folders])
        for key in self._keys(name, scan):
            await self._load(key, parameters, scan, frozenset())
            served = self._models[key].served_model()
            if served is not None and self._context.residents is not None:
                for version in served.versions.values():
                    await self._context.residents.bring(version)

    async def _load_all(
        self, keys: Iterable[str], scan: RepositoryScan, above: frozenset[str]
    ) -> dict[str, ServeError]:
        """Load these beside each other; returns why those failed that did."""
        failures: dict[str, ServeError] = {}

        async def load(key: str) -> None:
            try:
                await self._load(key, IN_REPOSITORY, scan, above)
            except ServeError as error:
                failures[key] = error

        await asyncio.gather(*map(load, keys))
        return failures

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
            await asyncio.sleep(self._context.settings.settle_seconds)
            folder = await self._find_folder(key, parameters, await self._context.scanner.run())
            contents = await self._read(self._names.bare(key), folder, parameters)
        for model in models:
            model.stop_loading()

    async def _find_folder(self, key: str, parameters: LoadParameters, scan: RepositoryScan) -> ModelScan:
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
                " --allow-remote-models=true to have requests bring models of their own"
            )
        if parameters.files:
            return ModelScan(name, Path(name), Path(name))
        self._context.log.error("failed to load '%s': there is no folder of that name in the model repositories", name)
        raise _not_polled(name)

    async def _read(self, name: str, folder: ModelScan, parameters: LoadParameters) -> tuple[ModelContent, ...]:
        try:
            return await asyncio.to_thread(self._context.reader.read, folder, parameters, name)
        except RequestRefused:
            raise
        except ServeError as error:
            self._table.reject(folder.key, Failure(error))
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
            scan = await self._context.scanner.run()
        needed = {key for member in members for key in self._keys(self._names.bare(member), scan)}
        keys = sorted(key for key in needed - own - above if not self._is_serving(key))
        for error in (await self._load_all(keys, scan, above)).values():
            self._context.log.error("a member could not be loaded: %s", error.text)

    def _is_serving(self, name: str) -> bool:
        model = self._models.get(name)
        return model is not None and model.is_serving


def _not_polled(name: str) -> ServeError:
    return internal(f"failed to load '{name}', failed to poll from model repository")
