"""The workers of a version: what they are told, and the group that runs them."""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rocserve.backends.base import EngineSpec
from rocserve.cache.private_folder import cache_directory
from rocserve.config.definition import ModelDefinition, find_model_file
from rocserve.config.json_text import config_json
from rocserve.config.model_limits import shared_worker, worker_bounds
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.model_config import with_sequence_tensors
from rocserve.repository.engine_plan import SMALL_MODEL_BYTES, EnginePlan
from rocserve.settings import NO_TIME_LIMITS, EngineSettings, TimeLimits, WorkerSettings
from rocserve.workers.group import WorkerGroup, WorkerGroupEvents
from rocserve.workers.instance_mail import InstanceMail
from rocserve.workers.instance_requests import CallStarter
from rocserve.workers.launcher import WorkerLauncher
from rocserve.workers.messages import LaunchOptions, Load, WorkerPlan


def load_message(
    definition: ModelDefinition,
    version: int,
    version_folder: Path,
    engine: EngineSpec,
    settings: EngineSettings,
    verbose: bool = False,
    architecture: str = "",
) -> Load:
    """What a worker is told of a version; the plan is each worker's own.

    Args:
        architecture: of its GPU; "" where it is not known.

    Raises:
        ServeError: INVALID_ARGUMENT, the model's file is missing.
    """
    backend = definition.backend
    assert backend is not None, "an ensemble has no workers"
    return Load(
        model_name=definition.name,
        version=version,
        model_folder=str(definition.folder),
        version_folder=str(version_folder),
        model_file=str(find_model_file(definition, version_folder, architecture)),
        engine=engine.module,
        config=with_sequence_tensors(definition.config),
        answers_requests=backend.answers_requests,
        config_json=config_text(definition),
        settings=settings,
        verbose=verbose,
    )


def config_text(definition: ModelDefinition) -> str:
    """The configuration for backends that hand it to their models."""
    wants_it = definition.backend is not None and definition.backend.answers_requests
    return config_json(definition.message) if wants_it else ""


def worker_group(
    load: Load,
    definition: ModelDefinition,
    plan: EnginePlan,
    *,
    launcher: WorkerLauncher,
    mail: InstanceMail,
    events: WorkerGroupEvents,
    start_call: CallStarter,
    log: logging.Logger,
    limits: TimeLimits = NO_TIME_LIMITS,
    content: str = "",
) -> WorkerGroup:
    """The workers of a version, not yet started. `start_call`: runs what the model calls, where its backend may.
    `content`: see WorkerGroup.

    Raises:
        ServeError: INVALID_ARGUMENT, the interpreter that the model asks for cannot run it, a bound is no number, or
            the model cannot be in the process of the group that it names.
    """
    backend = definition.backend
    assert backend is not None, "an ensemble has no workers"
    bounds = worker_bounds(definition.config.parameters)
    load = replace(load, memory_bytes=bounds.get("memory_bytes", launcher.settings.memory_bytes))
    writable: tuple[str, ...] = ()
    if _may_compile(definition, plan):
        # Found here, for a worker may run as a user with another home.
        cache = str(cache_directory(load.settings))
        load = replace(load, settings=replace(load.settings, cache_directory=cache))
        writable = (cache,)
    interpreter = model_interpreter(definition)
    shared = _shared_worker(definition, plan, bounds, launcher.settings)
    return WorkerGroup(
        load=replace(load, shares_process=bool(shared)),
        options=LaunchOptions(
            title=f"rocserve:{shared or load.model_name}",
            forked=plan.engine.forks_from_zygote and not interpreter and not plan.loader,
            interpreter=interpreter,
            loader=plan.loader,
            output_prefix=f"shared worker '{shared}': " if shared else f"{load.model_name}:{load.version}: ",
            bounds=bounds,
            readable=_own_files(definition) or _folders(load),
            writable=writable,
            model_name=load.model_name,
            shared_worker=shared,
        ),
        plans=[_with_file(worker, definition, Path(load.version_folder)) for worker in plan.workers],
        launcher=launcher,
        mail=mail,
        events=events,
        log=log,
        start_call=start_call if backend.answers_requests else None,
        limits=limits,
        content=content,
    )


def _shared_worker(
    definition: ModelDefinition, plan: EnginePlan, bounds: Mapping[str, int], settings: WorkerSettings
) -> str:
    """The group of models whose process this one is in; "" = it has its own. Who names a group is in it or refused; of
    the others the small ones that may are spread over the server's.

    Raises:
        ServeError: INVALID_ARGUMENT.
    """
    named = shared_worker(definition.config.parameters)
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
    """What keeps a model from being in one process with others; "" = nothing."""
    config = definition.config
    if not plan.engine.shares_process or plan.loader:
        return f"engine {plan.engine.name} runs each model in a process of its own"
    if any(worker.device is not None for worker in plan.workers):
        return "it is on a GPU"
    if config.gpu_accelerators or config.cpu_accelerators:
        return "it asks for execution accelerators"
    if config.operator_libraries:
        return "it brings custom operators"
    if any(worker.cores for worker in plan.workers):
        return "a host policy keeps its instances to CPU cores"
    if bounds:
        return "it has bounds of its own for its process"
    if any(model == definition.name for model, _ in settings.environment):
        return "--worker-environment has variables for it alone"
    # Whoever has access to the server could bring down what it serves to others.
    return "clients have brought its files" if definition.repository is None else ""


def _own_files(definition: ModelDefinition) -> tuple[str, ...]:
    """Of a model that lies among files of others; else nothing, as all in its folder is its own."""
    flat = definition.flat
    return () if flat is None or not flat.is_alone else tuple(map(str, flat.files(definition.folder)))


def _folders(load: Load) -> tuple[str, ...]:
    """What a worker reads of its model. Each file in it is looked at while other workers wait to be started: once."""
    model, version = Path(load.model_folder), Path(load.version_folder)
    is_within = version.resolve().is_relative_to(model.resolve())
    return (load.model_folder,) if is_within else (load.model_folder, load.version_folder)


def _may_compile(definition: ModelDefinition, plan: EnginePlan) -> bool:
    """Whether the workers may want the cache of compiled programs."""
    config = definition.config
    asks_for_accelerators = bool(config.gpu_accelerators or config.cpu_accelerators)
    on_gpu = any(worker.device is not None for worker in plan.workers)
    return plan.engine.needs_migraphx or plan.engine.compiles_ahead or asks_for_accelerators or on_gpu


def _with_file(worker: WorkerPlan, definition: ModelDefinition, version_folder: Path) -> WorkerPlan:
    """With the file that is meant for its GPU, where the configuration has one for each architecture."""
    if not definition.config.cc_model_filenames:
        return worker
    file = find_model_file(definition, version_folder, worker.architecture)
    return replace(worker, model_file=str(file))


PARAMETER = "EXECUTION_ENV_PATH"
"""Triton's parameter that names the Python of a model's workers; `$$TRITON_MODEL_DIRECTORY` in it is the model's
folder. There it is an archive that conda-pack made; here a virtual environment, or its interpreter."""

_MODEL_FOLDER = "$$TRITON_MODEL_DIRECTORY"
_ARCHIVES = (".tar.gz", ".tgz", ".tar", ".tar.bz2", ".tar.xz", ".zip")


def model_interpreter(definition: ModelDefinition) -> str:
    """The interpreter's path; empty for the server's own.

    Raises:
        ServeError: INVALID_ARGUMENT, what the parameter names is no Python.
    """
    written = definition.config.parameters.get(PARAMETER, "")
    if not written or definition.backend is None or not definition.backend.answers_requests:
        return ""
    path = Path(definition.folder, written.replace(_MODEL_FOLDER, str(definition.folder)))
    if path.name.lower().endswith(_ARCHIVES):
        raise _refusal(
            definition,
            f"'{written}' is an archive; unpack it, and name the folder of the environment or its interpreter",
        )
    interpreter = path / "bin" / "python" if path.is_dir() else path
    if not interpreter.is_file():
        raise _refusal(definition, f"there is no Python at {interpreter}; make it with: python3 -m venv {path}")
    if not os.access(interpreter, os.X_OK):
        raise _refusal(definition, f"{interpreter} cannot be executed")
    # Not resolved: the interpreter of a virtual environment is a link, and its place says which environment it is.
    return str(interpreter.absolute())


def _refusal(definition: ModelDefinition, reason: str) -> ServeError:
    return invalid_argument(f"model '{definition.name}': parameter {PARAMETER}: {reason}")
