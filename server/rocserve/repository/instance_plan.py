"""Which workers a model version gets: its instance groups, as processes and threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rocserve.backends.base import EngineSpec
from rocserve.backends.gpus import visible_gpus
from rocserve.backends.installed import is_installed
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.model_config import InstanceGroup, InstanceKind, ModelConfig
from rocserve.workers.group import WorkerPlan

_DEFAULT = InstanceGroup(name="", kind=InstanceKind.AUTO, count=1)


def plan_workers(
    config: ModelConfig, engine: EngineSpec, find_gpus: Callable[[], Sequence[int]] = visible_gpus
) -> Sequence[WorkerPlan]:
    """The workers of all groups that are not passive.

    On the CPU a group is one worker with `count` threads for a thread-safe engine, else `count` workers. On GPUs it is
    `count` workers for each of its `gpus`, or of all that there are.

    Raises:
        ServeError: INVALID_ARGUMENT, a group asks for a GPU that the engine cannot have. It is never served by the CPU
            instead unless the group says KIND_AUTO or KIND_CPU, or the parameter `engine` "auto".
    """
    plans: list[WorkerPlan] = []
    for number, group in enumerate(config.instance_groups or (_DEFAULT,)):
        if group.passive:
            continue
        name = group.name or f"{config.name}_{number}"
        gpus: Sequence[int] = ()
        if group.kind is InstanceKind.GPU:
            usable = bool(engine.gpu_module) and is_installed(engine.gpu_module)
            gpus = (group.gpus or find_gpus()) if usable else ()
            if not gpus and config.parameters.get("engine") != "auto":
                raise _no_gpu(config, engine, name, usable)
        plans.extend(_plans_of_group(group, name, gpus, engine))
    if not plans:
        raise invalid_argument(f"model {config.name} has no instance that may run: all its instance groups are passive")
    return plans


def _plans_of_group(group: InstanceGroup, name: str, gpus: Sequence[int], engine: EngineSpec) -> Sequence[WorkerPlan]:
    if gpus:
        places = [(gpu, place) for gpu in gpus for place in range(group.count)]
        return [WorkerPlan(InstanceKind.GPU, gpu, 1, f"{name}_{instance}") for instance, (gpu, _) in enumerate(places)]
    if engine.thread_safe:
        return [WorkerPlan(InstanceKind.CPU, None, group.count)]
    return [WorkerPlan(InstanceKind.CPU, None, 1, f"{name}_{instance}") for instance in range(group.count)]


def _no_gpu(config: ModelConfig, engine: EngineSpec, group: str, usable: bool) -> ServeError:
    why = ""
    if usable:
        why = " (none was found on this machine; name those to use in 'gpus')"
    elif engine.gpu_module:
        why = f" (the Python module {engine.gpu_module} is not installed)"
    return invalid_argument(
        f"instance group {group} of model {config.name} has kind KIND_GPU but no GPUs are available to the backend"
        f" '{config.backend}'{why}; use KIND_CPU or KIND_AUTO, or set parameter 'engine' to \"auto\" to accept the CPU"
    )
