"""Loads endpoints: a client asks for a worker of AMD Inference Server with a file, which is served until it is
unloaded. An endpoint is a model that no folder of a repository defines. An endpoint with a `next` is an ensemble of the
worker's own model and the next endpoint."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rocserve.amd_inference_server.configurations import (
    BATCH_SIZE,
    fill,
    model_message,
    parameter_text,
)
from rocserve.backends.registry import ENSEMBLE_PLATFORM
from rocserve.config.written import WrittenConfig
from rocserve.core.errors import ServeError, StatusCode, invalid_argument, not_found, unavailable
from rocserve.core.model_config import ModelConfig as PlainConfig
from rocserve.core.model_names import ModelKey
from rocserve.core.parameters import ParameterValue
from rocserve.core.serving import ServingTableHolder
from rocserve.protocol.model_config_pb2 import ModelConfig
from rocserve.repository.background_tasks import BackgroundTasks
from rocserve.repository.content import ContentReader, ModelContent
from rocserve.repository.model import wait_for_loads
from rocserve.repository.scanner import RepositoryScanner
from rocserve.repository.table import ModelTable
from rocserve.settings import RepositorySettings

_SOURCE = "the parameters of the worker"

_GRAPHDEF = {".pb": "tensorflow_graphdef", ".graphdef": "tensorflow_graphdef"}
_PLATFORMS: Mapping[str, Mapping[str, str]] = {
    "migraphx": {".onnx": "onnx_onnxv1", ".mxr": "migraphx_mxr"} | _GRAPHDEF,
    "onnx": {".onnx": "onnx_onnxv1"},
    "onnxruntime": {".onnx": "onnx_onnxv1"},
    "rocal": {".json": "rocal_json"},
    "tensorflow": _GRAPHDEF,
    "tfzendnn": _GRAPHDEF,
}
"""Worker -> (suffix -> platform), best first. As in that server, a file with another suffix replaces a missing one."""


@dataclass(frozen=True, slots=True)
class Worker:
    """What a client's WorkerLoad asks for: a model file and parameters."""

    platforms: Mapping[str, str]
    """File suffix -> platform, best first."""
    file: str
    """The model's file in the client's spelling."""
    parameters: Mapping[str, str]
    """The parameters for the model's configuration, including `batch`."""

    def candidates(self) -> tuple[str, ...]:
        path = Path(self.file)
        if not path.name:
            return (self.file,)
        beside = [str(path.with_suffix(suffix)) for suffix in self.platforms]
        batch = self.parameters.get("batch", BATCH_SIZE)
        compiled = [f"{path.with_suffix('')}_b{batch}.mxr"] if ".mxr" in self.platforms else []
        return tuple(dict.fromkeys([self.file, *beside, *compiled]))


def worker_config(
    name: str, worker: Worker, file: Path, copies: int, following: PlainConfig | None = None
) -> WrittenConfig:
    """Return the configuration of model `name` from the worker's `file`, which declares the tensors. `copies`: batches
    that may run at the same time. `following`: the model that takes the outputs; its inputs become the outputs of an
    image pipeline. Raises ServeError (INVALID_ARGUMENT) if the worker does not serve such files."""
    platform = worker.platforms.get(file.suffix)
    if platform is None:
        expected = " or ".join(worker.platforms)
        raise invalid_argument(f"parameter 'model' must name a file that ends in {expected}, got '{worker.file}'")
    message = model_message(name, platform, _SOURCE, worker.parameters, file.name)
    if following is not None and platform == "rocal_json":
        for entry in following.inputs:
            fill(message.output.add(), entry.name, entry.datatype, entry.dims)
    if copies > 1:
        message.instance_group.add(count=copies)
    return WrittenConfig((message,), _SOURCE, is_amd=True)


def chain_config(name: str, first: PlainConfig, following: PlainConfig) -> WrittenConfig:
    """Return the ensemble `name` of a worker's model and the endpoint that takes its outputs. Tensors are joined by
    name; if the names differ, by order, as in that server, which joins by order only. Raises ServeError
    (INVALID_ARGUMENT) if they do not fit."""
    message = ModelConfig(name=name, platform=ENSEMBLE_PLATFORM)
    message.max_batch_size = min(first.max_batch_size, following.max_batch_size)
    # If only one member batches, its batch is a dimension like any other of the ensemble.
    before, after = ((-1,) if one.max_batch_size and not message.max_batch_size else () for one in (first, following))
    for entry in first.inputs:
        fill(message.input.add(optional=entry.optional), entry.name, entry.datatype, (*before, *entry.dims))
    for output in following.outputs:
        fill(message.output.add(), output.name, output.datatype, (*after, *output.dims))
    outputs, inputs = [entry.name for entry in first.outputs], [entry.name for entry in following.inputs]
    if not set(inputs) <= set(outputs) and len(inputs) != len(outputs):
        wanted, offered = (", ".join(f"'{name}'" for name in names) for names in (inputs, outputs))
        raise invalid_argument(
            f"'{following.name}' cannot come next: its inputs are {wanted}, and the outputs before it are {offered}"
        )
    # Input of the following model -> the output that it takes.
    joined = dict(zip(inputs, inputs if set(inputs) <= set(outputs) else outputs, strict=True))
    between = {output: f"{first.name}:{output}" for output in joined.values()}
    steps = message.ensemble_scheduling.step
    steps.add(
        model_name=first.name,
        model_version=-1,
        input_map={entry.name: entry.name for entry in first.inputs},
        output_map=between,
    )
    steps.add(
        model_name=following.name,
        model_version=-1,
        input_map={name: between[output] for name, output in joined.items()},
        output_map={entry.name: entry.name for entry in following.outputs},
    )
    return WrittenConfig((message,), _SOURCE, is_amd=True)


def find_worker_file(candidates: Sequence[str], settings: RepositorySettings) -> tuple[Path, Path]:
    """Return the first candidate that exists, and the allowed folder that it is in, both resolved. Links may lead
    anywhere within the allowed folders. Relative paths are within a repository. Reads the disk. Raises ServeError:
    PERMISSION_DENIED if the search meets a candidate in no allowed folder; NOT_FOUND if none exists."""
    folders = [folder.resolve() for folder in (*settings.roots, *settings.worker_load_folders)]
    # An absolute candidate replaces the root.
    paths = [root.absolute() / candidate for candidate in candidates for root in settings.roots]
    for path in dict.fromkeys(paths):
        root = None
        # A link that leads to itself cannot be resolved.
        with suppress(OSError, RuntimeError):
            target = path.resolve()
            root = next((folder for folder in folders if target.is_relative_to(folder)), None)
        if root is None:
            # Clients may not learn whether the file exists.
            raise ServeError(
                StatusCode.PERMISSION_DENIED,
                f"'{path}' is not in a model repository; put it there, or start the server with"
                " --allow-worker-load=FOLDER",
            )
        # A file with too long a name cannot exist.
        with suppress(OSError):
            if target.is_file():
                return target, root
    looked_for = ", ".join(candidates)
    raise not_found(f"model file {candidates[0]} not found or can't be opened; looked for {looked_for}")


_STAGE = "_stage"
"""Ends the name of the worker's own model if its endpoint has a `next`."""


@dataclass(slots=True, eq=False)
class _Endpoint:
    """An endpoint that a client loaded, with the models that serve it."""

    name: str
    worker_name: str
    parameters: Mapping[str, ParameterValue]
    """The client's parameters without `share`."""
    worker: Worker
    copies: int = 0
    """Loads that need an unload, including one in progress. A load that shares a loaded endpoint adds none."""
    served: tuple[ModelContent, ...] = ()
    """The models of the last load, a chain's ensemble first."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held during a load or unload."""

    @property
    def next(self) -> str:
        """The endpoint that takes this one's outputs; "" = the client does."""
        return str(self.parameters.get("next", ""))

    @property
    def folder(self) -> ModelKey:
        """The key in the model table; no folder of a repository has this key."""
        return ModelKey(f"/{self.name}")

    @property
    def model(self) -> str:
        return self.name + _STAGE if self.next else self.name


@dataclass(frozen=True)
class WorkerEndpoints:
    """Loads and unloads endpoints, on the event loop's thread."""

    settings: RepositorySettings
    scanner: RepositoryScanner
    """Knows the models of the repositories, whose names no endpoint may take."""
    reader: ContentReader
    table: ModelTable
    tables: ServingTableHolder
    background: BackgroundTasks
    log: logging.Logger
    _endpoints: dict[str, _Endpoint] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        return self._named(name) is not None

    def listed_models(self) -> list[str]:
        """Return the names of models that answer requests, without the stages of chains."""
        stages = {endpoint.model for endpoint in self._endpoints.values() if endpoint.next}
        return sorted(model.name for model in self.tables.table.all_models if model.latest and model.name not in stages)

    async def load(self, worker: str, parameters: Mapping[str, ParameterValue]) -> str:
        """Return the endpoint of a worker with these parameters, and load it if necessary, even if the caller is
        cancelled. Raises ServeError if endpoints are not allowed or too many, the worker or its file cannot be served,
        or the load fails."""
        if not self.settings.allow_amd_endpoints:
            raise unavailable(
                "workers are not loaded by request; start the server with --model-control-mode=explicit, or with"
                " --allow-amd-endpoints=true"
            )
        return await asyncio.shield(self.background.start(self._load(worker, parameters), f"load of worker {worker}"))

    async def _load(self, name: str, parameters: Mapping[str, ParameterValue]) -> str:
        own_parameters = dict(parameters)
        share = own_parameters.pop("share", True)
        following = own_parameters.get("next", "")
        if not isinstance(following, str):
            raise invalid_argument(f"parameter 'next' must be the name of an endpoint, got {following!r}")
        worker = self._read(name, own_parameters)
        if following and not self.has(following) and following not in self._present():
            raise not_found(f"No next endpoint found at: {following}")
        while True:
            endpoint = self._endpoint(name, own_parameters, worker)
            async with endpoint.lock:
                # Another task may have dropped the endpoint while this task waited for the lock.
                if self._endpoints.get(endpoint.name) is endpoint:
                    if not (endpoint.copies and share):
                        await self._add(endpoint)
                    return endpoint.name

    async def unload(self, name: str) -> None:
        """Unload an endpoint once; it is removed with the last of its loads. Unknown names are ignored."""
        endpoint = self._named(name)
        if endpoint is None:
            return
        async with endpoint.lock:
            if endpoint.copies > 1:
                endpoint.copies -= 1
                try:
                    await self._serve(endpoint)
                except ServeError as error:
                    # The file may be gone: the endpoint keeps its instances until the last unload.
                    self.log.warning("endpoint '%s' keeps its instances: %s", endpoint.name, error.text)
            elif self._endpoints.get(endpoint.name) is endpoint:
                endpoint.copies = 0
                self._drop(endpoint)

    def _named(self, name: str) -> _Endpoint | None:
        """Return the endpoint that has this name, or whose own model has it: a chain's stages are unloaded together."""
        return next((one for one in self._endpoints.values() if name in (one.name, one.model)), None)

    def _endpoint(self, worker_name: str, parameters: Mapping[str, ParameterValue], worker: Worker) -> _Endpoint:
        """Return the endpoint with equal parameters, or a new one, with a number after the worker's name if
        necessary."""
        for endpoint in self._endpoints.values():
            if endpoint.worker_name == worker_name and endpoint.parameters == parameters:
                return endpoint
        names_in_use = (
            self._endpoints.keys() | self._present() | {scan.name for scan in self.scanner.latest.models.values()}
        )
        names = itertools.chain((worker_name,), (f"{worker_name}-{number}" for number in itertools.count()))
        name = next(name for name in names if name not in names_in_use and name + _STAGE not in names_in_use)
        self._endpoints[name] = endpoint = _Endpoint(name, worker_name, parameters, worker)
        return endpoint

    async def _add(self, endpoint: _Endpoint) -> None:
        """Count a load and serve the endpoint; the caller holds its lock. Raises ServeError."""
        endpoint.copies += 1
        try:
            most = self.settings.max_amd_endpoints
            if sum(endpoint.copies for endpoint in self._endpoints.values()) > most:
                raise ServeError(
                    StatusCode.RESOURCE_EXHAUSTED,
                    f"there are already {most} endpoints, the most allowed; unload one, or start the server with a"
                    " larger --max-amd-endpoints",
                )
            await self._serve(endpoint)
        except BaseException:
            endpoint.copies -= 1
            if not endpoint.copies:
                self._drop(endpoint)
            raise

    def _read(self, name: str, parameters: Mapping[str, ParameterValue]) -> Worker:
        """Return the worker with those parameters that a client may set. Raises ServeError: NOT_FOUND if there is no
        such worker; UNIMPLEMENTED if this server cannot run it; INVALID_ARGUMENT if a parameter is invalid."""
        unsupported = {
            "ptzendnn": "export the model to ONNX and load it with the worker 'migraphx'",
            "xmodel": "such models run on FPGAs only; load the original ONNX model with the worker 'migraphx'",
            "cplusplus": "it is a library for that server's C++ interface; write a Python model in the repository",
            "python": "its file is a program; put it into the repository, as a model with the backend 'python'",
        }
        if name in unsupported:
            raise ServeError(StatusCode.UNIMPLEMENTED, f"the worker '{name}' cannot be loaded: {unsupported[name]}")
        if name not in _PLATFORMS:
            raise ServeError(
                StatusCode.NOT_FOUND, f"there is no worker '{name}'; expected one of {', '.join(sorted(_PLATFORMS))}"
            )
        file = parameters.get("model")
        if not isinstance(file, str) or not file or "\0" in file:
            raise invalid_argument(
                f"the worker '{name}' needs the parameter 'model', the path of the model's file on the server; got"
                f" {file!r}"
            )
        batch = parameters.get("batch", BATCH_SIZE)
        if type(batch) is not int or not 1 <= batch < 2**31:
            raise invalid_argument(f"parameter 'batch' must be a positive integer, got {batch!r}")
        # The endpoint's own parameters, and tuning parameters of that server's workers, do not belong to the model.
        texts = {
            key: parameter_text(value)
            for key, value in parameters.items()
            if key not in {"model", "share", "next", "batchers"}
        }
        if name == "onnxruntime":
            texts.setdefault("engine", "onnxruntime")
        platforms = _PLATFORMS[name]
        backends = [self.reader.registry.find(platform, "") for platform in platforms.values()]
        allowed = {"batch"}.union(*(backend.request_parameters for backend in backends if backend is not None))
        if refused := sorted(texts.keys() - allowed):
            self.log.info("worker '%s': parameters without effect: %s", name, ", ".join(refused))
        return Worker(platforms, file, {key: value for key, value in texts.items() if key in allowed})

    async def _serve(self, endpoint: _Endpoint) -> None:
        """Load the endpoint's models. Raises ServeError."""
        worker = endpoint.worker
        file, root = await asyncio.to_thread(find_worker_file, worker.candidates(), self.settings)
        following = self.tables.table.find(endpoint.next, "").config if endpoint.next else None
        config = worker_config(endpoint.model, worker, file, endpoint.copies, following)
        own = await asyncio.to_thread(self.reader.define, config, endpoint.model, file, root)
        # The ensemble of a loaded chain answers requests meanwhile.
        ensemble = endpoint.served[:-1]
        try:
            await self._apply(endpoint, (*ensemble, *own))
            if following is not None:
                chain = chain_config(endpoint.name, self.tables.table.find(endpoint.model, "").config, following)
                ensemble = await asyncio.to_thread(self.reader.define, chain, endpoint.name, None, root)
                await self._apply(endpoint, (*ensemble, *own))
        except ServeError:
            if endpoint.served:
                self.table.apply(endpoint.folder, endpoint.served)
            raise
        endpoint.served = (*ensemble, *own)

    async def _apply(self, endpoint: _Endpoint, contents: Sequence[ModelContent]) -> None:
        """Load models and wait for them. Raises ServeError if one cannot be served."""
        self.table.apply(endpoint.folder, contents, retries_failed=True)
        models = [self.table.models[content.model] for content in contents]
        await wait_for_loads(models)
        for model in models:
            model.check_loaded()

    def _drop(self, endpoint: _Endpoint) -> None:
        self.table.drop(endpoint.folder)
        self._endpoints.pop(endpoint.name, None)

    def _present(self) -> set[str]:
        """Return the names in the serving table, except removed models, which stay there so that errors can say so."""
        gone = {model.name for model in self.table.models.values() if model.folder is None}
        return self.tables.table.models.keys() - gone
