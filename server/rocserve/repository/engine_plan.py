"""Chooses a version's engine, its workers (processes and threads), and a fallback for a failed engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from rocserve.backends.base import EngineChoice, EngineSpec, Machine
from rocserve.backends.parameters import asked_engine
from rocserve.config.definition import ModelDefinition, find_model_file
from rocserve.core.errors import ServeError, StatusCode, invalid_argument, unreadable
from rocserve.core.load_check import RECORDED_FILE, LoadCheckFailed
from rocserve.core.model_config import InstanceGroup, InstanceKind, ModelConfig
from rocserve.observability.log_fields import about
from rocserve.repository.load_order import LoadOrder
from rocserve.workers.messages import WorkerPlan

_Loaded = TypeVar("_Loaded")

SMALL_MODEL_BYTES = 4 << 20
"""Models up to this size get a process per instance, not threads: a copy of the model takes less memory than the
process, and threads mostly wait for the interpreter's lock (four answered a quarter of one thread's requests)."""

Places = Sequence[tuple[InstanceKind, Sequence[int]]]
"""Each instance group's final kind (KIND_AUTO replaced by KIND_GPU or KIND_CPU) and its GPUs."""


def plan_workers(
    config: ModelConfig, choice: EngineChoice, machine: Machine, model_bytes: int
) -> tuple[Sequence[WorkerPlan], Places]:
    """Plan the workers of all groups that are not passive, and the places of all groups. `model_bytes`: size of the
    version's files.

    On the CPU a group is one worker with `count` threads if the engine is thread-safe and the model not small, else
    `count` workers. On GPUs it is `count` workers for each of its `gpus`, or for all present GPUs. A group of KIND_AUTO
    uses GPUs only if the engine's choice allows it. A group of KIND_MODEL is `count` workers with all GPUs each if the
    engine supports it, else it is treated as KIND_AUTO. KIND_GPU gets the CPU only if the parameter `engine` is "auto".
    Raises ServeError (INVALID_ARGUMENT) if all groups are passive, there are too many instances, or a GPU is unusable.
    """
    plans: list[WorkerPlan] = []
    places: list[tuple[InstanceKind, Sequence[int]]] = []
    asked = {InstanceKind.CPU: 0, InstanceKind.GPU: 0}
    used_gpus: set[int] = set()
    default = InstanceGroup(name="", kind=InstanceKind.AUTO, count=1)
    for number, group in enumerate(config.instance_groups or (default,)):
        if group.passive:
            places.append((group.kind, group.gpus))
            continue
        name = group.name or f"{config.name}_{number}"
        is_model = group.kind is InstanceKind.MODEL
        has_all = is_model and choice.engine.takes_kind_model
        gpus = () if has_all else _gpus_of_group(group, name, config, choice, machine)
        kind = InstanceKind.GPU if gpus else InstanceKind.CPU
        places.append((group.kind, group.gpus) if is_model else (kind, gpus))
        # Checked before the plans are created: anybody can write a huge `count`.
        used_gpus.update(gpus)
        asked[kind] += group.count * max(len(gpus), 1)
        # If the machine's GPUs cannot be listed, one is assumed, because the configuration may name any number.
        most = machine.most_instances(max(1, min(len(used_gpus), len(machine.gpus))) if gpus else 0)
        if asked[kind] > most:
            raise invalid_argument(
                f"the instance groups of model {config.name} ask for {asked[kind]} instances on the"
                f" {'GPUs' if gpus else 'CPU'}, at most {most} are possible here; lower 'count', or raise"
                " --max-model-instances"
            )
        shares = not gpus and choice.engine.thread_safe and model_bytes > SMALL_MODEL_BYTES
        devices: list[int | None] = [gpu for gpu in gpus or (None,) for _ in range(1 if shares else group.count)]
        for instance, device in enumerate(devices):
            # Without a host policy Triton uses the policy with the device's name.
            own = "model" if is_model else "cpu" if device is None else f"gpu_{device}"
            plan = WorkerPlan(
                InstanceKind.MODEL if has_all else kind,
                device,
                group.count if shares else 1,
                "" if shares else f"{name}_{instance}",
                group.rate_limiter,
                tuple(machine.cores(group.host_policy or own)),
                "" if device is None else machine.architecture(device),
                group_name=name if shares else "",
            )
            plans.append(plan)
    if not plans:
        raise invalid_argument(f"model {config.name} has no instance that may run: all its instance groups are passive")
    return plans, places


def _gpus_of_group(
    group: InstanceGroup, name: str, config: ModelConfig, choice: EngineChoice, machine: Machine
) -> Sequence[int]:
    """Return the group's GPUs; empty = the group runs on the CPU."""
    absent = sorted(set(group.gpus) - set(machine.gpus)) if machine.gpus else ()
    if absent:
        raise invalid_argument(
            f"instance group {name} of model {config.name} specifies invalid or unsupported gpu id {absent[0]}; this"
            f" machine has: {', '.join(map(str, machine.gpus))}"
        )
    if group.kind is InstanceKind.GPU:
        gpus = (group.gpus or machine.gpus) if _takes_gpus(choice.engine, machine) else ()
        if not gpus and asked_engine(config) != "auto":
            engine = choice.engine
            if _takes_gpus(engine, machine):
                why = " (none was found on this machine; name those to use in 'gpus')"
            elif engine.gpu_module and not engine.gpu_files:
                why = f" (the Python module {engine.gpu_module} is not installed)"
            else:
                why = f" (engine {engine.name} runs it: {choice.reason})"
            raise invalid_argument(
                f"instance group {name} of model {config.name} has kind KIND_GPU but no GPUs are available to the"
                f" backend '{config.backend}'{why}; use KIND_CPU or KIND_AUTO, or set parameter 'engine' to \"auto\" to"
                " accept the CPU"
            )
        return gpus
    if group.kind is InstanceKind.CPU or not choice.auto_takes_gpus:
        return ()
    return group.gpus or machine.gpus


def _takes_gpus(engine: EngineSpec, machine: Machine) -> bool:
    return engine.needs_migraphx or engine.has_gpu_parts(machine)


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """The workers that run a version on one engine."""

    engine: EngineSpec
    reason: str
    """Why this engine was chosen; follows "engine onnxruntime: "."""
    workers: Sequence[WorkerPlan]
    loader: tuple[str, ...]
    """Words before the interpreter in the workers' command."""
    fallback: EngineChoice | None
    model_bytes: int
    places: Places = ()
    replaces: str = ""
    """The engine that was planned first and failed; "" = `engine` is the first one."""

    @property
    def properties(self) -> Mapping[str, str]:
        facts = {"engine": self.engine.name, "engine_reason": self.reason}
        if self.replaces:
            facts["engine_replaces"] = self.replaces
        return {**facts, "devices": ", ".join(dict.fromkeys(map(_place, self.workers)))}

    @property
    def warning(self) -> str:
        """Shown next to the model's state in the repository index; "" = the first engine runs."""
        if not self.replaces:
            return ""
        return f"served by {self.engine.name} instead: {shortened(self.reason)}"


def shortened(warning: str) -> str:
    """Return a warning as the index shows it."""
    # The log and the metadata have the whole text.
    return warning if len(warning) <= 300 else warning[:297] + "..."


def _place(worker: WorkerPlan) -> str:
    if worker.kind is InstanceKind.MODEL:
        return "chosen by the model"
    return "cpu" if worker.device is None else f"gpu {worker.device}"


def plan_engine(definition: ModelDefinition, version_folder: Path, machine: Machine) -> EnginePlan:
    """Choose the engine for a configuration on this machine. Blocks on the disk. Raises ServeError if the requested
    engine is unavailable, an instance cannot get its GPU, or the files cannot be read."""
    backend, flat = definition.backend, definition.flat
    assert backend is not None, "an ensemble has no engine"
    try:
        files = flat.files(version_folder) if flat is not None and flat.is_alone else version_folder.rglob("*")
        model_bytes = sum(file.stat().st_size for file in files if file.is_file() and file.name != RECORDED_FILE)
    except OSError as error:  # The files may be removed meanwhile.
        raise unreadable(f"the version's files cannot be read: {error.strerror}", error) from None
    try:
        choice = backend.engine_for(definition.config, machine)
    except ServeError:
        # To install the engine does not help a model whose file the backend cannot read. Names by architecture need the
        # engine's devices.
        if not definition.config.cc_model_filenames:
            find_model_file(definition, version_folder)
        raise
    return _plan(definition, choice, machine, model_bytes)


class EngineFailed(ServeError):
    """The engine could not load or warm up the model; another engine might."""

    def __init__(self, error: ServeError) -> None:
        super().__init__(error.code, error.text)
        self.error = error.with_traceback(None)


async def load_on_engine(
    order: LoadOrder, machine: Machine, load: Callable[[EnginePlan], Awaitable[_Loaded]], log: logging.Logger
) -> _Loaded:
    """Load on the planned engine, and on the next fallback if it fails. `load` raises EngineFailed with the engine's
    error. Raises ServeError from `plan_engine` or `load`, or the engine's failure with the reason for no fallback."""
    definition = order.definition
    plan = await asyncio.to_thread(plan_engine, definition, order.folder, machine)
    before, can_pass = "", False
    while True:
        try:
            return await load(plan)
        except EngineFailed as failed:
            error = failed.error
        # Another engine's failure may be temporary, even if the last one refuses the file.
        error.can_pass = can_pass = can_pass or error.can_pass
        instead = "" if plan.fallback is None else plan.fallback.engine.name
        # A wrong file or configuration also fails on the same engine's other device.
        is_checked = isinstance(error, LoadCheckFailed)
        is_hopeless = instead == plan.engine.name and error.code is StatusCode.INVALID_ARGUMENT and not is_checked
        if plan.fallback is None or is_hopeless:
            raise error.with_text(f"engine {plan.engine.name}: {error.text}{before}") if before else error
        try:
            next_plan = _plan(definition, plan.fallback, machine, plan.model_bytes)
        except ServeError as refusal:
            text = f"{error.text}{before}; engine {instead} cannot replace it: {refusal.text}"
            raise error.with_text(text) from None
        on_gpu, on_cpu = (" on the GPU", " on the CPU") if instead == plan.engine.name else ("", "")
        fault = "fails its load check" if is_checked else "cannot load it"
        failure = f"engine {plan.engine.name} {fault}{on_gpu}: {error.text}{before}"
        fields = about(model=order.definition.name, version=order.version)
        log.warning("%s: %s; engine %s%s replaces it", order.name, failure, instead, on_cpu, extra=fields)
        plan = replace(next_plan, reason=failure, replaces=plan.replaces or plan.engine.name)
        before = f"; earlier, {failure}"


def _plan(definition: ModelDefinition, choice: EngineChoice, machine: Machine, model_bytes: int) -> EnginePlan:
    workers, places = plan_workers(definition.config, choice, machine, model_bytes)
    loader = machine.loader(choice.engine)
    return EnginePlan(choice.engine, choice.reason, workers, loader, choice.fallback, model_bytes, places)
