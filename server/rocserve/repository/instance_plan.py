"""Which workers a model version gets: its instance groups, as processes and threads."""

from __future__ import annotations

from collections.abc import Sequence

from rocserve.backends.base import BackendSpec
from rocserve.core.errors import invalid_argument
from rocserve.core.model_config import InstanceGroup, InstanceKind, ModelConfig
from rocserve.workers.group import WorkerPlan

_DEFAULT = InstanceGroup(name="", kind=InstanceKind.AUTO, count=1)


def plan_workers(config: ModelConfig, backend: BackendSpec) -> Sequence[WorkerPlan]:
    """One worker with `count` threads for a thread-safe backend, else `count` workers; for each group.

    Raises:
        ServeError: INVALID_ARGUMENT, a group asks for a GPU, which no backend of this version runs on. It is never
            served by the CPU instead unless the group says KIND_AUTO or KIND_CPU, or the parameter `engine` "auto".
    """
    plans: list[WorkerPlan] = []
    for number, group in enumerate(config.instance_groups or (_DEFAULT,)):
        if group.passive:
            continue
        if group.kind is InstanceKind.GPU and config.parameters.get("engine") != "auto":
            raise invalid_argument(
                f"instance group {group.name or config.name + '_0'} of model {config.name} has kind KIND_GPU but no"
                f" GPUs are available to the backend '{backend.name}'; use KIND_CPU or KIND_AUTO, or set"
                " parameter 'engine' to \"auto\" to accept the CPU"
            )
        if backend.thread_safe:
            plans.append(WorkerPlan(InstanceKind.CPU, None, group.count))
        else:
            name = group.name or f"{config.name}_{number}"
            plans.extend(WorkerPlan(InstanceKind.CPU, None, 1, f"{name}_{instance}") for instance in range(group.count))
    if not plans:
        raise invalid_argument(f"model {config.name} has no instance that may run: all its instance groups are passive")
    return plans
