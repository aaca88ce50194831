"""The workers of a version: what they load, how they are started, and the state of each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rocserve.core.load_check import NOT_CHECKED, LoadCheckReport
from rocserve.core.model_config import InstanceKind
from rocserve.settings import TimeLimits
from rocserve.workers.load_limit import LoadLimit
from rocserve.workers.messages import LaunchOptions, Load, WorkerPlan
from rocserve.workers.process import WorkerSession


@dataclass(slots=True, eq=False)
class Worker:
    """One of the workers, over all its restarts."""

    load: Load
    options: LaunchOptions
    limit: LoadLimit
    session: WorkerSession | None = None
    """None while it is being started, and after its end."""
    supervision: asyncio.Task[None] | None = None
    load_check: LoadCheckReport = NOT_CHECKED
    is_down: bool = False
    progress: str = ""
    is_checking: bool = False
    """`progress` is about the check of the model."""
    silent_seconds: Sequence[float] = ()
    """How long each of its silent instances has not answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWorkers:
    """The workers that a version needs."""

    load: Load
    options: LaunchOptions
    """For workers on the CPU; a worker on a GPU is never forked, and may also use the GPU's devices."""
    plans: Sequence[WorkerPlan]

    def workers(self, limits: TimeLimits) -> list[Worker]:
        """Return the workers, which are not started yet."""
        found = []
        for plan in self.plans:
            load = replace(self.load, plan=plan, model_file=plan.model_file or self.load.model_file)
            # A GPU library reads the variable when it is loaded, so the device is chosen before the process starts.
            has_gpus = plan.device is not None or plan.kind is InstanceKind.MODEL
            options = self.options.on_gpus(plan.device) if has_gpus else self.options
            found.append(Worker(load, options, LoadLimit(limits.load_timeout_seconds)))
        return found
