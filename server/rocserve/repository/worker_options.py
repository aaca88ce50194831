"""Plans the start of a version's workers: what they load, may use, and share."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rocserve.cache.folders import cache_directory
from rocserve.config.definition import ModelDefinition, find_model_file
from rocserve.config.model_folder import is_true
from rocserve.config.model_limits import SHARED_WORKER, worker_bounds
from rocserve.core.errors import invalid_argument
from rocserve.core.model_config import with_sequence_tensors
from rocserve.protocol.json_form import plain_values
from rocserve.protocol.model_config_pb2 import ModelConfig
from rocserve.repository.engine_plan import SMALL_MODEL_BYTES, EnginePlan
from rocserve.repository.load_order import LoadOrder
from rocserve.settings import EngineSettings, WorkerSettings
from rocserve.workers.messages import LaunchOptions, Load
from rocserve.workers.worker import Worker


def plan_version_workers(
    order: LoadOrder, plan: EnginePlan, engines: EngineSettings, settings: WorkerSettings
) -> Sequence[Worker]:
    """Plan the start of a version's workers. Raises ServeError (INVALID_ARGUMENT) if the model's file is missing, its
    interpreter cannot run it, a bound is not a number, or the model cannot join its shared worker."""
    definition = order.definition
    backend = definition.backend
    assert backend is not None, "an ensemble has no workers"
    bounds = worker_bounds(definition.config.parameters)
    writable: tuple[str, ...] = ()
    config = definition.config
    on_gpu = any(worker.device is not None for worker in plan.workers)
    accelerated = bool(config.gpu_accelerators or config.cpu_accelerators) or on_gpu
    if plan.engine.needs_migraphx or plan.engine.compiles_ahead or accelerated:
        # These workers may use the cache of compiled programs. The server finds its folder, because a worker may run as
        # a user with another home.
        engines = replace(engines, cache_directory=str(cache_directory(engines)))
        writable = (engines.cache_directory,)
    shared = _shared_worker(definition, plan, bounds, settings)
    load = Load(
        model_name=definition.name,
        version=order.version,
        model_folder=str(definition.folder),
        version_folder=str(order.folder),
        model_file="",  # below, for each worker
        engine=plan.engine.module,
        config=with_sequence_tensors(definition.config),
        answers_requests=backend.answers_requests,
        config_json=config_text(definition),
        settings=engines,
        memory_bytes=bounds.get("memory_bytes", settings.memory_bytes),
        shares_process=bool(shared),
    )
    interpreter, flat = model_interpreter(definition), definition.flat
    options = LaunchOptions(
        title=f"rocserve:{shared or load.model_name}",
        forked=plan.engine.forks_from_zygote and not interpreter and not plan.loader,
        preload=plan.engine.zygote_modules,
        interpreter=interpreter,
        loader=plan.loader,
        output_prefix=f"shared worker '{shared}': " if shared else f"{load.model_name}:{load.version}: ",
        log_fields={} if shared else {"model": load.model_name, "version": str(load.version)},
        bounds=bounds,
        # A model whose files lie among other models' files reads only its own files, any other model its whole
        # folder.
        readable=tuple(map(str, flat.files(definition.folder))) if flat and flat.is_alone else _folders(load),
        writable=writable,
        model_name=load.model_name,
        shared_worker=shared,
    )
    architectures = {worker.architecture for worker in plan.workers}
    files = {one: str(find_model_file(definition, order.folder, one)) for one in architectures}
    return [
        Worker(replace(load, plan=worker, model_file=files[worker.architecture]), options.of(worker))
        for worker in plan.workers
    ]


def config_text(definition: ModelDefinition) -> str:
    """Return the configuration for backends that pass it to their models; "" for the others."""
    wants_it = definition.backend is not None and definition.backend.answers_requests
    return config_json(definition.message) if wants_it else ""


def config_json(message: ModelConfig) -> str:
    """Return the whole configuration as Triton's backends pass it to their models."""
    return json.dumps(plain_values(message), separators=(",", ":"))


def _shared_worker(
    definition: ModelDefinition, plan: EnginePlan, bounds: Mapping[str, int], settings: WorkerSettings
) -> str:
    """Return the name of the worker that the model shares with others; "" = a separate process. A model that names a
    shared worker joins it or is refused. Small models that name none are spread over the server's shared workers.
    Raises ServeError (INVALID_ARGUMENT)."""
    named = definition.config.parameters.get(SHARED_WORKER)
    if named == "" or (named is None and not settings.shared_workers):
        return ""
    obstacle = _obstacle_to_sharing(definition, plan, bounds, settings)
    if named is None:
        number = zlib.crc32(definition.name.encode()) % max(settings.shared_workers, 1)
        return "" if obstacle or plan.model_bytes > SMALL_MODEL_BYTES else f"shared-{number}"
    if obstacle:
        raise invalid_argument(
            f"model '{definition.name}' cannot be in the shared worker '{named}': {obstacle}; remove parameter"
            " 'shared_worker'"
        )
    return named


def _obstacle_to_sharing(
    definition: ModelDefinition, plan: EnginePlan, bounds: Mapping[str, int], settings: WorkerSettings
) -> str:
    """Return why the model cannot share a process; "" = it can."""
    config, engine = definition.config, plan.engine
    obstacles = {
        f"engine {engine.name} runs each model in a separate process": not engine.shares_process or plan.loader,
        "it is on a GPU": any(worker.device is not None for worker in plan.workers),
        "it asks for execution accelerators": config.gpu_accelerators or config.cpu_accelerators,
        "it brings custom operators": config.operator_libraries,
        "a host policy keeps its instances to CPU cores": any(worker.cores for worker in plan.workers),
        "it sets bounds for its process": bounds,
        "--worker-environment has variables for it alone": definition.name in dict(settings.environment),
        # Such a model could bring down models of other clients.
        "clients have brought its files": definition.repository is None,
    }
    return next((text for text, applies in obstacles.items() if applies), "")


def _folders(load: Load) -> tuple[str, ...]:
    """Return the folders that the worker may read. A version's folder inside of the model's is not repeated, because
    every file is checked while other workers wait for their start."""
    model, version = Path(load.model_folder), Path(load.version_folder)
    is_within = version.resolve().is_relative_to(model.resolve())
    return (load.model_folder,) if is_within else (load.model_folder, load.version_folder)


_INTERPRETER_PARAMETER = "EXECUTION_ENV_PATH"
"""Triton's parameter for the Python of a model's workers. `$$TRITON_MODEL_DIRECTORY` in it is the model's folder.
Triton expects an archive made by conda-pack; rocserve a virtual environment or its interpreter."""


def model_interpreter(definition: ModelDefinition) -> str:
    """Return the model's interpreter; "" = the server's. Raises ServeError (INVALID_ARGUMENT) if it cannot run."""
    written = definition.config.parameters.get(_INTERPRETER_PARAMETER, "")
    if not written or definition.backend is None or not definition.backend.answers_requests:
        return ""
    path = Path(definition.folder, written.replace("$$TRITON_MODEL_DIRECTORY", str(definition.folder)))
    interpreter = path / "bin" / "python" if is_true(path.is_dir) else path
    if path.name.lower().endswith((".tar.gz", ".tgz", ".tar", ".tar.bz2", ".tar.xz", ".zip")):
        problem = f"'{written}' is an archive; unpack it, and name the folder of the environment or its interpreter"
    elif not is_true(interpreter.is_file):
        # A link from the model's folder to the system's Python would lead out of the repository.
        how = "venv --copies" if path.is_relative_to(definition.folder) else "venv"
        problem = f"there is no Python at {interpreter}; make it with: python3 -m {how} {path}"
    elif not os.access(interpreter, os.X_OK):
        problem = f"{interpreter} cannot be executed"
    else:
        # Not resolved: the interpreter of a virtual environment is a link, and its location tells Python which
        # environment it is.
        return str(interpreter.absolute())
    raise invalid_argument(f"model '{definition.name}': parameter {_INTERPRETER_PARAMETER}: {problem}")
