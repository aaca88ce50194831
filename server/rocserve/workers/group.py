"""Loads and stops all workers of one model version, and reports what they are doing."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from rocserve.core.backoff import Backoff
from rocserve.core.custom_metrics import MetricChanges
from rocserve.core.load_check import LoadCheckReport, merged
from rocserve.core.model_config import ModelConfig
from rocserve.core.requests import Signature
from rocserve.links.opening import HEAP_BYTES
from rocserve.observability.failures import Allowance
from rocserve.plane.heap import SharedHeap
from rocserve.settings import NO_TIME_LIMITS, TimeLimits
from rocserve.workers.instance import Instance, InstanceMail
from rocserve.workers.instance_requests import CallStarter
from rocserve.workers.launcher import WorkerLauncher
from rocserve.workers.messages import LaunchOptions, Load, WarmUp, WorkerPlan
from rocserve.workers.own_check import OwnCheck
from rocserve.workers.process import WorkerSession
from rocserve.workers.worker_supervisor import WorkerSupervisor

_Result = TypeVar("_Result")

_MEASURE = re.compile(r"[0-9][0-9.:]* ?(?:%|(?:ms|s|min|h|[KMGT]?i?B)\b)")
"""Times, percentages and sizes in a report of progress."""
_BURST_LINES = 100
_LINES_A_SECOND = 10
"""Bounds lines of progress in the log; an engine has a handful of phases."""
_MOST_PARTS = 2
"""Bounds the line that says what all workers are doing."""


RESTARTS = Backoff(first_seconds=0.1, longest_seconds=30.0)
"""The delays from the second restart in a row on. The first is immediate. Restarts never stop."""


class WorkerGroupEvents:
    """Takes a group's events, all on the asyncio loop. A subclass overrides the events that it needs."""

    def instance_opened(self, instance: Instance) -> None:
        """The instance takes batches from now on."""

    def instance_lost(self, instance: Instance) -> None:
        """The instance's worker has ended. The group fails the batches in it right after this call."""

    def restarting(self, reason: str, delay_seconds: float) -> None:
        """A worker has ended, or could not be restarted. It is started after the delay."""

    def recovered(self) -> None:
        pass

    def progress(self, text: str, is_check: bool) -> None:
        """What the workers' engines are doing, in one line; "" = nothing. Also called during the load. `is_check`: they
        check the model."""

    def silent(self, text: str) -> None:
        """Which instances have not answered for a while, in one line; "" = none."""

    def described(self, properties: Mapping[str, str]) -> None:
        pass

    def measured(self, changes: MetricChanges) -> None:
        pass


class WorkerGroup:
    """Manages the workers of one model version. Lives on the asyncio loop."""

    def __init__(
        self,
        *,
        load: Load,
        options: LaunchOptions,
        plans: Sequence[WorkerPlan],
        launcher: WorkerLauncher,
        mail: InstanceMail,
        events: WorkerGroupEvents,
        log: logging.Logger,
        backoff: Backoff = RESTARTS,
        start_call: CallStarter | None = None,
        limits: TimeLimits = NO_TIME_LIMITS,
        reported: set[str] | None = None,
    ) -> None:
        """`options`: for workers on the CPU; a worker on a GPU is never forked, and may also use the GPU's devices.
        `start_call`: runs the model's calls, on the data plane's thread; only for a backend that answers requests.
        `reported`: what loads of the same files have logged."""
        self.events = events
        self.launcher = launcher
        self.mail = mail
        self.log = log
        self.backoff = backoff
        self.start_call = start_call
        self.limits = limits
        self._reported = set() if reported is None else reported
        self._output_prefix = options.output_prefix
        self.name = f"model '{load.model_name}' version {load.version}"
        self.inputs = SharedHeap(f"rocserve:{load.model_name}", HEAP_BYTES, mail.plane.work_off_later)
        self.restarts = 0
        self._own_check = OwnCheck(self.name, lambda: self._workers, log)
        self._down: set[int] = set()
        self._progress: dict[int, str] = {}
        self._checking: set[int] = set()
        """Workers whose progress is about the check of their model."""
        self._silent: dict[int, Sequence[float]] = {}
        self._count = len(plans)
        self._instance_count = sum(plan.instance_count for plan in plans)
        self._log_allowance = Allowance(_BURST_LINES, _LINES_A_SECOND)
        self._supervisors = [WorkerSupervisor(self, index, plan, load, options) for index, plan in enumerate(plans)]

    @property
    def _workers(self) -> Sequence[WorkerSession]:
        # Other threads call this too, so a worker may end at any moment.
        return [worker for worker in [supervisor.worker for supervisor in self._supervisors] if worker is not None]

    @property
    def instances(self) -> Sequence[Instance]:
        """Instances that take batches now; none before `warm_up`."""
        return [instance for worker in self._workers for instance in worker.instances if not instance.closed]

    @property
    def load_check(self) -> LoadCheckReport:
        """What the workers' checks of the model have found, each finding once."""
        return merged(supervisor.load_check for supervisor in self._supervisors)

    @property
    def models_of_workers(self) -> Mapping[int, int]:
        """Number of models in each worker process that still runs, by process id."""
        processes = (worker.process for worker in self._workers)
        return {process.pid: len(process.sessions) for process in processes if process.sessions}

    @property
    def own_check(self) -> OwnCheck | None:
        """Asks the model whether it is ready; None = the model has no such check, or no worker."""
        return self._own_check if any(worker.checks_readiness for worker in self._workers) else None

    async def load(self) -> Signature:
        """Start all workers at the same time. After a failure or a cancellation none is left. Raises ServeError."""
        signatures = await self._all_or_none([supervisor.load() for supervisor in self._supervisors])
        # Workers on different devices may have checked differently.
        return next((each for each in signatures if each.dependent_rows), signatures[0])

    async def warm_up(self, config: ModelConfig, config_json: str = "", recorded_answers: str = "") -> None:
        """Warm up all workers with the completed config; an instance opens when its worker is ready. After a failure or
        a cancellation no worker is left. `config_json`: for backends that answer requests. `recorded_answers`: as in
        WarmUp. Raises ServeError."""
        message = WarmUp(config, config_json, recorded_answers)
        await self._all_or_none([supervisor.warm_up(message) for supervisor in self._supervisors])

    async def stop(self, grace_seconds: float, reason: str = "") -> None:
        """End all workers after their batches, or after `grace_seconds`. `reason`: the error of requests lost then."""
        await asyncio.gather(*(supervisor.stop(grace_seconds, reason) for supervisor in self._supervisors))
        # The supervisors, the check and the group refer to each other, which only a garbage collection would resolve.
        self._supervisors.clear()
        self._own_check = OwnCheck(self.name, tuple, self.log)
        self.events, self.start_call = WorkerGroupEvents(), None
        self.mail.close_heap(self.inputs)

    async def _all_or_none(self, steps: Sequence[Coroutine[Any, Any, _Result]]) -> list[_Result]:
        tasks = [asyncio.ensure_future(step) for step in steps]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(supervisor.kill() for supervisor in self._supervisors))
            self.mail.close_heap(self.inputs)
            raise

    def worker_down(self, index: int, reason: str, delay_seconds: float) -> None:
        """Count and report a worker that must be started again."""
        self.restarts += index not in self._down
        self._down.add(index)
        self.events.restarting(reason, delay_seconds)

    def worker_up(self, index: int) -> None:
        self._down.discard(index)
        if not self._down:
            self.events.recovered()

    def worker_progress(self, index: int, text: str, is_check: bool = False) -> None:
        before = self._progress_line(), self._is_checking
        # The log gets a line for each new phase, not for each change of its numbers.
        phases = {_MEASURE.sub("", line) for line in self._progress.values()}
        self._progress[index] = text
        (self._checking.add if is_check else self._checking.discard)(index)
        if text and _MEASURE.sub("", text) not in phases and self._log_allowance.take():
            # The end of a check has a line that says all.
            self.log.log(logging.DEBUG if is_check else logging.INFO, "%s: %s", self.name, text)
        after = self._progress_line(), self._is_checking
        if after != before:
            self.events.progress(*after)

    @property
    def _is_checking(self) -> bool:
        return bool(self._checking) and not any(
            text for index, text in self._progress.items() if index not in self._checking
        )

    def worker_trace(self, trace: str) -> None:
        """Log a traceback once: other workers, and later loads of the same files, fail at the same lines."""
        lines = trace.splitlines()
        place = "\n".join(line for line in lines if line.startswith("  File ")) or trace
        if place not in self._reported:
            self._reported.add(place)
            for line in lines:
                self.log.error("%s%s", self._output_prefix, line)

    def worker_silent(self, index: int, seconds: Sequence[float]) -> None:
        """Report for how many seconds each silent instance of a worker has not answered."""
        self._silent[index] = seconds
        silent = [one for each in self._silent.values() for one in each]
        if not silent:
            self.events.silent("")
            return
        have = "has" if len(silent) == 1 else "have"
        self.events.silent(
            f"{len(silent)} of {self._instance_count} instances {have} not answered for {max(silent):.0f} s"
        )

    def _progress_line(self) -> str:
        """Return one line for all workers; workers that report the same text share a part of the line."""
        by_text: dict[str, list[int]] = {}
        for index, text in sorted(self._progress.items()):
            if text:
                by_text.setdefault(text, []).append(index + 1)
        if self._count == 1:
            return next(iter(by_text), "")
        parts = [
            f"worker{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))} of {self._count}: {text}"
            for text, numbers in by_text.items()
        ]
        more = f"; {len(parts) - _MOST_PARTS} more" if len(parts) > _MOST_PARTS else ""
        return "; ".join(parts[:_MOST_PARTS]) + more
