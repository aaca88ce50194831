"""AMD Inference Server's workers: a client names a file, and it is served as an endpoint until it is unloaded.

An endpoint is a model like those of the repositories, but that no folder there defines it. One that has a `next` is an
ensemble of the worker's own model and of the endpoint that comes next.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from rocserve.config.worker_models import Worker, chain_config, read_worker, worker_config
from rocserve.core.errors import ServeError, StatusCode, invalid_argument, not_found
from rocserve.core.model_config import ModelConfig
from rocserve.core.requests import ParameterValue
from rocserve.core.serving import ServingTableHolder
from rocserve.repository.content import ContentReader, ModelContent
from rocserve.repository.model import wait_for_loads
from rocserve.repository.scanner import RepositoryScanner
from rocserve.repository.table import ModelTable
from rocserve.settings import RepositorySettings


@dataclass(slots=True)
class _Group:
    """The endpoints of one worker."""

    names: dict[Hashable, str] = field(default_factory=dict)
    """By the parameters that they were asked for with."""
    next_number: int = 0


class WorkerNames:
    """Equal parameters mean the same endpoint, others a new one."""

    def __init__(self, is_taken: Callable[[str], bool]) -> None:
        """`is_taken`: whether a model of a repository has the name."""
        self._is_taken = is_taken
        self._groups: dict[str, _Group] = {}

    def name(self, worker: str, parameters: Hashable) -> str:
        """The endpoint's name, which it keeps until `forget`."""
        group = self._groups.setdefault(worker, _Group())
        name = group.names.get(parameters)
        if name is None:
            name = worker if not group.names else self._numbered(worker, group)
            while self._is_taken(name):
                name = self._numbered(worker, group)
            group.names[parameters] = name
        return name

    def forget(self, worker: str, parameters: Hashable) -> None:
        """The endpoint is no more. When it was the worker's last, its names begin anew."""
        group = self._groups[worker]
        group.names.pop(parameters)
        if not group.names:
            self._groups.pop(worker)

    def _numbered(self, worker: str, group: _Group) -> str:
        number, group.next_number = group.next_number, group.next_number + 1
        return f"{worker}-{number}"


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


_STAGE = "_stage"
"""Behind the name of an endpoint in a chain: the worker's own model."""

_Parameters = tuple[tuple[str, ParameterValue], ...]


@dataclass(slots=True, eq=False)
class _Endpoint:
    name: str
    worker: str
    parameters: _Parameters
    next: str
    """The endpoint that gets what this one gives; "" = it is answered."""
    copies: int = 0
    """How often it was loaded for its own (`share` was false), and is to be unloaded."""
    is_growing: bool = False
    """One more copy is being loaded."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it is being loaded or unloaded."""

    @property
    def folder(self) -> str:
        """In the catalogue; no folder of a repository has such a name."""
        return f"/{self.name}"

    @property
    def model(self) -> str:
        """The worker's own model."""
        return self.name + _STAGE if self.next else self.name


class WorkerEndpoints:
    """All calls are made on the loop's thread."""

    def __init__(
        self,
        settings: RepositorySettings,
        scanner: RepositoryScanner,
        reader: ContentReader,
        table: ModelTable,
        tables: ServingTableHolder,
        log: logging.Logger,
    ) -> None:
        """`scanner`: of the repositories, whose models' names no endpoint takes."""
        self._files = WorkerFiles(settings.roots, settings.worker_load_folders)
        self._scanner = scanner
        self._reader = reader
        self._table = table
        self._tables = tables
        self._most = settings.most_endpoints
        self._log = log
        self._names = WorkerNames(self._is_taken)
        self._endpoints: dict[str, _Endpoint] = {}

    def has(self, name: str) -> bool:
        return name in self._endpoints

    @property
    def stages(self) -> frozenset[str]:
        """The models that are parts of endpoints, and none themselves."""
        return frozenset(endpoint.model for endpoint in self._endpoints.values() if endpoint.next)

    async def load(self, name: str, parameters: Mapping[str, ParameterValue]) -> str:
        """The endpoint of a worker with these parameters, loaded where there is none yet.

        Raises:
            ServeError: there is no such worker, its file must not be served, there are too many endpoints, or the load
                failed.
        """
        given = dict(parameters)
        share = given.pop("share", True)
        following = given.pop("next", "")
        if not isinstance(following, str):
            raise invalid_argument(f"parameter 'next' must be the name of an endpoint, got {following!r}")
        worker = self._read(name, given)
        if following and not self.has(following) and following not in self._present():
            raise not_found(f"No next endpoint found at: {following}")
        own_parameters = tuple(sorted((key, value) for key, value in parameters.items() if key != "share"))
        while True:
            endpoint = self._endpoint(name, own_parameters, following)
            async with endpoint.lock:
                # It may have been dropped while this one waited.
                if self._endpoints.get(endpoint.name) is endpoint:
                    if not (endpoint.copies and share):
                        await self._add(endpoint, worker)
                    return endpoint.name

    async def unload(self, name: str) -> None:
        """Take an endpoint away; one that was loaded for several keeps the others. Unknown names are fine."""
        endpoint = self._endpoints.get(name)
        if endpoint is None:
            return
        async with endpoint.lock:
            if endpoint.copies > 1:
                given = dict(endpoint.parameters)
                given.pop("next", None)
                await self._serve(endpoint, self._read(endpoint.worker, given), endpoint.copies - 1)
                endpoint.copies -= 1
            elif self._endpoints.get(name) is endpoint:
                endpoint.copies = 0
                self._drop(endpoint)

    def _endpoint(self, worker: str, parameters: _Parameters, following: str) -> _Endpoint:
        name = self._names.name(worker, parameters)
        return self._endpoints.setdefault(name, _Endpoint(name, worker, parameters, following))

    async def _add(self, endpoint: _Endpoint, worker: Worker) -> None:
        """Under the endpoint's lock. Raises: ServeError."""
        try:
            if sum(each.copies + each.is_growing for each in self._endpoints.values()) >= self._most:
                raise ServeError(
                    StatusCode.RESOURCE_EXHAUSTED,
                    f"there are {self._most} endpoints, as many as there may be; unload one, or start the server with a"
                    " larger --max-amd-endpoints",
                )
            endpoint.is_growing = True
            await self._serve(endpoint, worker, endpoint.copies + 1)
        except BaseException:
            if not endpoint.copies:
                self._drop(endpoint)
            raise
        finally:
            endpoint.is_growing = False
        endpoint.copies += 1

    def _read(self, name: str, parameters: Mapping[str, ParameterValue]) -> Worker:
        """The worker that is asked for, with those of its parameters that a client may set. Raises: ServeError."""
        worker = read_worker(name, parameters)
        allowed = {
            parameter
            for platform in worker.kind.platforms.values()
            if (backend := self._reader.registry.find(platform, "")) is not None
            for parameter in backend.request_parameters
        }
        refused = sorted(worker.parameters.keys() - allowed)
        if refused:
            self._log.info("worker '%s': parameters without effect: %s", name, ", ".join(refused))
        passed = {key: value for key, value in worker.parameters.items() if key in allowed}
        return replace(worker, parameters=passed)

    async def _serve(self, endpoint: _Endpoint, worker: Worker, copies: int) -> None:
        """Raises: ServeError."""
        file = await asyncio.to_thread(self._files.find, worker.candidates())
        following = self._served(endpoint.next) if endpoint.next else None
        config = worker_config(endpoint.model, worker, file.path, copies, following)
        own = await asyncio.to_thread(self._reader.read_given, config, endpoint.model, file.path, file.root)
        await self._apply(endpoint, own)
        if following is not None:
            chain = chain_config(endpoint.name, self._served(endpoint.model), following)
            both = await asyncio.to_thread(self._reader.read_given, chain, endpoint.name, None, file.root)
            await self._apply(endpoint, (*both, *own))

    async def _apply(self, endpoint: _Endpoint, contents: Iterable[ModelContent]) -> None:
        """Raises: ServeError: one of the models cannot be served."""
        contents = tuple(contents)
        self._table.take(endpoint.folder, contents, at_once=True)
        models = [self._table.models[content.model] for content in contents]
        await wait_for_loads(models)
        for model in models:
            if (error := model.load_error()) is not None:
                raise error

    def _served(self, name: str) -> ModelConfig:
        """Raises: ServeError."""
        return self._tables.table.find(name, "").config

    def _drop(self, endpoint: _Endpoint) -> None:
        self._table.drop(endpoint.folder)
        if self._endpoints.pop(endpoint.name, None) is not None:
            self._names.forget(endpoint.worker, endpoint.parameters)

    def _is_taken(self, name: str) -> bool:
        taken = {*(scan.name for scan in self._scanner.latest.models.values()), *self._present()}
        return name in taken or name + _STAGE in taken

    def _present(self) -> set[str]:
        """The serving table keeps models that are gone, to say so."""
        gone = {model.name for model in self._table.models.values() if model.is_gone}
        return self._tables.table.models.keys() - gone
