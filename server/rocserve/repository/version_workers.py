"""Workers of a version: plans them, and connects them to the version's scheduler."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rocserve.backends.request_model import ModelCall
from rocserve.cache.folders import cache_directory
from rocserve.config.definition import ModelDefinition, find_model_file
from rocserve.config.model_folder import is_true
from rocserve.config.model_limits import SHARED_WORKER, time_limits, worker_bounds
from rocserve.core.custom_metrics import MetricChanges, OwnedMetrics
from rocserve.core.errors import ServeError, invalid_argument, unavailable
from rocserve.core.load_check import NOT_CHECKED, LoadCheckReport
from rocserve.core.model_config import with_sequence_tensors
from rocserve.plane.loop import PlaneLoop
from rocserve.protocol.json_form import plain_values
from rocserve.protocol.model_config_pb2 import ModelConfig
from rocserve.repository.engine_plan import SMALL_MODEL_BYTES, EnginePlan, shortened
from rocserve.repository.loads import LoadOrder, LoadProgress
from rocserve.scheduling.model_calls import start_call
from rocserve.scheduling.rate_limiter import needs_of
from rocserve.scheduling.scheduler import Scheduler
from rocserve.settings import NO_TIME_LIMITS, EngineSettings, TimeLimits, WorkerSettings
from rocserve.workers.group import WorkerGroup, WorkerGroupEvents
from rocserve.workers.instance import Instance, InstanceMail
from rocserve.workers.instance_requests import CallStarter, OpenCall
from rocserve.workers.launcher import WorkerLauncher
from rocserve.workers.messages import LaunchOptions, Load

if TYPE_CHECKING:
    from rocserve.repository.version_loader import WorkerVersionLoader

OUTAGE_SECONDS = 5.0
"""Seconds that requests wait for the workers of a crashed model before they are refused."""
_STOP_SECONDS = 10.0
"""Seconds that an idle worker may take to exit."""

_Argument = TypeVar("_Argument")


class VersionWorkers(WorkerGroupEvents):
    """Runs the workers of a version, and reports their events to the version's scheduler and the repository index. All
    calls but `start_call` are made on the asyncio loop; the properties may be read from any thread. Only this class
    calls a scheduler from the loop's side, because schedulers live on the data plane's thread."""

    def __init__(self, order: LoadOrder, plan: EnginePlan, loader: WorkerVersionLoader) -> None:
        """`loader`: what the loads of all versions share. Raises ServeError: as `worker_group`, and INVALID_ARGUMENT if
        the rate limiter's resources can never suffice for an instance."""
        self._order = order
        self._plan = plan
        self.properties: Mapping[str, str] = plan.properties
        """Properties that the engine reports override the plan's."""
        self.load_check = NOT_CHECKED
        self._start_call = functools.partial(start_call, loader.dispatcher)
        self._has_called = False
        self._metrics = OwnedMetrics(loader.custom_metrics, order.name, loader.log)
        limits = time_limits(order.definition.config.parameters, loader.time_limits)
        self._drain_seconds = limits.drain_timeout_seconds
        self.plane = loader.mail.plane
        self._log = loader.log
        self._scheduler: Scheduler | None = None
        self._instances: set[Instance] = set()
        self._outage_timer: asyncio.TimerHandle | None = None
        self._restart_reason = ""
        self._hang_text = ""
        self._progress = ""
        self.group = worker_group(
            order,
            plan,
            launcher=loader.launcher,
            mail=loader.mail,
            engines=loader.engines,
            events=self,
            start_call=self.start_call,
            log=loader.log.getChild("workers"),
            limits=limits,
        )
        self._release_resources: Callable[[], None] | None = None
        if loader.limiter is not None:
            needs = [needs_of(one.rate_limiter, one.device) for one in plan.workers for _ in range(one.instance_count)]
            self._release_resources = loader.limiter.register(needs)

    @property
    def available(self) -> bool:
        return bool(self._instances)

    @property
    def reason(self) -> str:
        return "; ".join(filter(None, (self._plan.warning, shortened(self.load_check.warning), self._worker_reason)))

    @property
    def _worker_reason(self) -> str:
        return "; ".join(filter(None, (self._restart_reason, self._hang_text, self._progress)))

    def connect(self, scheduler: Scheduler) -> None:
        """Give the instances to the scheduler, now and whenever they change."""
        self._scheduler = scheduler
        for instance in self.group.instances:
            self.instance_opened(instance)

    async def drain_and_stop(self) -> None:
        """Let the scheduler finish its requests within the drain timeout, then end the workers. Workers that are late
        are killed, and their requests refused."""
        assert self._scheduler is not None, "connected until the version is gone"
        if await drained(self.plane, self._scheduler.close, self._drain_seconds):
            self._cancel_outage_timer()
            await self.stop(_STOP_SECONDS)
            return
        text = (
            f"{self._order.name} was unloaded and had not answered within {self._drain_seconds:g} s"
            " (--drain-timeout-secs)"
        )
        self._log.warning("%s; its workers are killed", text)
        self._refuse_waiting(self._scheduler, unavailable(text))
        await self.stop(0.0, text)

    async def stop(self, grace_seconds: float, reason: str = "") -> None:
        """End the workers as WorkerGroup.stop does. Afterwards no reference to the scheduler or the instances is left,
        because each would keep its buffers until the next garbage collection."""
        await self.group.stop(grace_seconds, reason)
        self._cancel_outage_timer()
        scheduler, self._scheduler = self._scheduler, None
        if scheduler is not None:
            for instance in self._instances:
                self._call_on_plane(scheduler.detach, instance)
        self._instances.clear()
        self._metrics.forget()
        if self._release_resources is not None:
            self._release_resources()

    def start_call(self, call: ModelCall, opened: OpenCall) -> None:
        """Implements workers.instance_requests.CallStarter. Called on the data plane's thread."""
        scheduler, caller = self._scheduler, None
        if scheduler is not None:
            caller = scheduler.caller(opened.requests.instance)
            if not self._has_called:
                self._has_called = True
                scheduler.stop_sending_ahead()
        self._start_call(call, opened, caller)

    def instance_opened(self, instance: Instance) -> None:
        if self._scheduler is not None:
            self._instances.add(instance)
            self._call_on_plane(self._scheduler.attach, instance)

    def instance_lost(self, instance: Instance) -> None:
        self._instances.discard(instance)
        if self._scheduler is not None:
            self._call_on_plane(self._scheduler.detach, instance)

    def restarting(self, reason: str, delay_seconds: float) -> None:
        self._restart_reason = f"restarting: {reason}"
        if not self._instances and self._outage_timer is None:
            loop = asyncio.get_running_loop()
            self._outage_timer = loop.call_later(OUTAGE_SECONDS, self._refuse_in_outage)
        self._order.on_change()

    def recovered(self) -> None:
        self._restart_reason = ""
        self._cancel_outage_timer()
        self._order.on_change()

    def progress(self, text: str, is_check: bool) -> None:
        self._progress = text
        if self._scheduler is None:
            self._order.on_progress(LoadProgress(text, is_check))

    def silent(self, text: str) -> None:
        self._hang_text = text

    def described(self, properties: Mapping[str, str]) -> None:
        checked = {"load_check": self.load_check.text} if self.load_check.parts else {}
        self.properties = {**self._plan.properties, **checked, **properties}

    def checked(self, report: LoadCheckReport) -> None:
        """Note what the load check has found."""
        self.load_check = report
        self.described(self.properties)

    def measured(self, changes: MetricChanges) -> None:
        self._metrics.apply(changes)

    def _cancel_outage_timer(self) -> None:
        if self._outage_timer is not None:
            self._outage_timer.cancel()
            self._outage_timer = None

    def _refuse_in_outage(self) -> None:
        self._outage_timer = None
        if not self._instances and self._scheduler is not None:
            text = f"model '{self._order.definition.name}' has no worker: {self._worker_reason}"
            self._refuse_waiting(self._scheduler, unavailable(text))

    def _refuse_waiting(self, scheduler: Scheduler, error: ServeError) -> None:
        self._cancel_outage_timer()
        self._call_on_plane(scheduler.fail_queue, error)

    def _call_on_plane(self, call: Callable[[_Argument], None], argument: _Argument) -> None:
        self.plane.call_soon(functools.partial(call, argument))


async def drained(plane: PlaneLoop, close: Callable[[Callable[[], None]], None], seconds: float) -> bool:
    """Close a version and wait at most `seconds` (0 = no limit). Returns whether all its requests are answered."""
    loop = asyncio.get_running_loop()
    event = asyncio.Event()

    def on_drained() -> None:
        loop.call_soon_threadsafe(event.set)

    plane.call_soon(functools.partial(close, on_drained))
    try:
        async with asyncio.timeout(seconds or None):
            await event.wait()
    except TimeoutError:
        return False
    return True


def worker_group(
    order: LoadOrder,
    plan: EnginePlan,
    *,
    launcher: WorkerLauncher,
    mail: InstanceMail,
    engines: EngineSettings,
    events: WorkerGroupEvents,
    start_call: CallStarter,
    log: logging.Logger,
    limits: TimeLimits = NO_TIME_LIMITS,
) -> WorkerGroup:
    """Create the workers of a version without starting them. `start_call`: runs calls of the model, if its backend may
    call. Raises ServeError (INVALID_ARGUMENT) if the model's file is missing, its interpreter cannot run it, a bound is
    not a number, or the model cannot join its shared worker."""
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
    shared = _shared_worker(definition, plan, bounds, launcher.settings)
    load = Load(
        model_name=definition.name,
        version=order.version,
        model_folder=str(definition.folder),
        version_folder=str(order.folder),
        model_file=str(find_model_file(definition, order.folder, plan.workers[0].architecture)),
        engine=plan.engine.module,
        config=with_sequence_tensors(definition.config),
        answers_requests=backend.answers_requests,
        config_json=config_text(definition),
        settings=engines,
        memory_bytes=bounds.get("memory_bytes", launcher.settings.memory_bytes),
        shares_process=bool(shared),
    )
    interpreter, flat = model_interpreter(definition), definition.flat
    plans = list(plan.workers)
    if definition.config.cc_model_filenames:
        # Each worker gets the file that is meant for its GPU.
        files = [str(find_model_file(definition, order.folder, worker.architecture)) for worker in plans]
        plans = [replace(worker, model_file=file) for worker, file in zip(plans, files, strict=True)]
    return WorkerGroup(
        load=load,
        options=LaunchOptions(
            title=f"rocserve:{shared or load.model_name}",
            forked=plan.engine.forks_from_zygote and not interpreter and not plan.loader,
            interpreter=interpreter,
            loader=plan.loader,
            output_prefix=f"shared worker '{shared}': " if shared else f"{load.model_name}:{load.version}: ",
            bounds=bounds,
            # A model whose files lie among other models' files reads only its own files, any other model its whole
            # folder.
            readable=tuple(map(str, flat.files(definition.folder))) if flat and flat.is_alone else _folders(load),
            writable=writable,
            model_name=load.model_name,
            shared_worker=shared,
        ),
        plans=plans,
        launcher=launcher,
        mail=mail,
        events=events,
        log=log,
        start_call=start_call if backend.answers_requests else None,
        limits=limits,
        reported=order.reported_warnings,
    )


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
        f"engine {engine.name} runs each model in a process of its own": not engine.shares_process or plan.loader,
        "it is on a GPU": any(worker.device is not None for worker in plan.workers),
        "it asks for execution accelerators": config.gpu_accelerators or config.cpu_accelerators,
        "it brings custom operators": config.operator_libraries,
        "a host policy keeps its instances to CPU cores": any(worker.cores for worker in plan.workers),
        "it has bounds of its own for its process": bounds,
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

_MODEL_FOLDER = "$$TRITON_MODEL_DIRECTORY"
_ARCHIVES = (".tar.gz", ".tgz", ".tar", ".tar.bz2", ".tar.xz", ".zip")


def model_interpreter(definition: ModelDefinition) -> str:
    """Return the model's interpreter; "" = the server's. Raises ServeError (INVALID_ARGUMENT) if it cannot run."""
    written = definition.config.parameters.get(_INTERPRETER_PARAMETER, "")
    if not written or definition.backend is None or not definition.backend.answers_requests:
        return ""
    path = Path(definition.folder, written.replace(_MODEL_FOLDER, str(definition.folder)))
    interpreter = path / "bin" / "python" if is_true(path.is_dir) else path
    if path.name.lower().endswith(_ARCHIVES):
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
