"""AMD Inference Server's workers: a client names a file, and it is served as an endpoint until it is unloaded.

An endpoint is a model like those of the repositories, but that no folder there defines it. One that has a `next` is an
ensemble of the worker's own model and of the endpoint that comes next.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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


@dataclass(frozen=True, slots=True)
class WorkerFile:
    path: Path
    """Resolved."""
    root: Path
    """The allowed folder that it is in, resolved; links may lead anywhere within it."""


def find_worker_file(candidates: Sequence[str], settings: RepositorySettings) -> WorkerFile:
    """The first of the files that is there. A relative path is one within a repository. Blocks on the disk.

    Raises:
        ServeError: PERMISSION_DENIED, it is in no folder whose files clients may name; NOT_FOUND, there is none.
    """
    folders = [folder.resolve() for folder in (*settings.roots, *settings.worker_load_folders)]
    # With an absolute path nothing is left of the repository's.
    paths = [root.absolute() / candidate for candidate in candidates for root in settings.roots]
    for path in dict.fromkeys(paths):
        found = None
        # A link to itself is nowhere.
        with suppress(OSError, RuntimeError):
            target = path.resolve()
            found = next((WorkerFile(target, root) for root in folders if target.is_relative_to(root)), None)
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
        self._settings = settings
        self._scanner = scanner
        self._reader = reader
        self._table = table
        self._tables = tables
        self._log = log
        self._endpoints: dict[str, _Endpoint] = {}
        self._numbers: Counter[str] = Counter()
        """By worker: how many names with a number it has given."""

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
        """Equal parameters mean the same endpoint, others a new one: its name is the worker's, with a number behind it
        where that is taken."""
        own = [endpoint for endpoint in self._endpoints.values() if endpoint.worker == worker]
        for endpoint in own:
            if endpoint.parameters == parameters:
                return endpoint
        if not own:
            self._numbers.pop(worker, None)
        name = self._numbered(worker) if own else worker
        while self._is_taken(name):
            name = self._numbered(worker)
        self._endpoints[name] = endpoint = _Endpoint(name, worker, parameters, following)
        return endpoint

    def _numbered(self, worker: str) -> str:
        self._numbers[worker] += 1
        return f"{worker}-{self._numbers[worker] - 1}"

    async def _add(self, endpoint: _Endpoint, worker: Worker) -> None:
        """Under the endpoint's lock. Raises: ServeError."""
        try:
            most = self._settings.most_endpoints
            if sum(each.copies + each.is_growing for each in self._endpoints.values()) >= most:
                raise ServeError(
                    StatusCode.RESOURCE_EXHAUSTED,
                    f"there are {most} endpoints, as many as there may be; unload one, or start the server with a"
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
        file = await asyncio.to_thread(find_worker_file, worker.candidates(), self._settings)
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
        self._endpoints.pop(endpoint.name, None)

    def _is_taken(self, name: str) -> bool:
        taken = {*(scan.name for scan in self._scanner.latest.models.values()), *self._present()}
        return name in taken or name + _STAGE in taken

    def _present(self) -> set[str]:
        """The serving table keeps models that are gone, to say so."""
        gone = {model.name for model in self._table.models.values() if model.is_gone}
        return self._tables.table.models.keys() - gone
