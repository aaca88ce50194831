"""All workers of one version of a model."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from rocserve.core.custom_metrics import MetricChanges
from rocserve.core.errors import ServeError
from rocserve.core.model_config import ModelConfig
from rocserve.core.requests import Signature
from rocserve.observability.rate_limits import Allowance
from rocserve.plane.shared_heap import SharedHeap
from rocserve.settings import NO_TIME_LIMITS, TimeLimits
from rocserve.workers.instance import HEAP_BYTES, Instance
from rocserve.workers.instance_mail import InstanceMail
from rocserve.workers.instance_requests import CallStarter
from rocserve.workers.launcher import WorkerLauncher
from rocserve.workers.messages import LaunchOptions, Load, WarmUp, WorkerPlan
from rocserve.workers.supervisor import DEFAULT_POLICY, RestartPolicy, WorkerSupervisor

_Result = TypeVar("_Result")

_MEASURE = re.compile(r"[0-9][0-9.:]* ?(?:%|(?:ms|s|min|h|[KMGT]?i?B)\b)")
"""Times, shares, sizes."""
_BURST_LINES = 100
_LINES_A_SECOND = 10
"""Of progress in the log; an engine has a handful of phases."""
_MOST_PARTS = 2
"""Of the line that says what all workers are at."""


class WorkerGroupEvents:
    """What a group reports, all on the asyncio loop; what a subclass leaves out is ignored."""

    def instance_opened(self, instance: Instance) -> None:
        """An instance takes batches."""

    def instance_lost(self, instance: Instance, reason: ServeError) -> None:
        """Its worker has ended; the batches in it are failed by themselves, right after this call."""

    def restarting(self, reason: str, delay_seconds: float) -> None:
        """A worker has ended, or could not be restarted; it is started after the delay."""

    def recovered(self) -> None:
        """All workers serve again."""

    def progress(self, text: str) -> None:
        """What the workers' engines are at, in one line, from the load on; "" = nothing beside serving."""

    def silent(self, text: str) -> None:
        """Which instances owe an answer and have given none for a while, in one line; "" = none."""

    def described(self, properties: Mapping[str, str]) -> None:
        """How an engine runs the model."""

    def measured(self, changes: MetricChanges) -> None:
        """What has become of the metrics that the model defines."""


class WorkerGroup:
    """Loads, warms up, supervises and ends the workers of one model version. Lives on the asyncio loop."""

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
        policy: RestartPolicy = DEFAULT_POLICY,
        start_call: CallStarter | None = None,
        limits: TimeLimits = NO_TIME_LIMITS,
        content: str = "",
    ) -> None:
        """`load`: what all workers load, each by its plan. `options`: how they are started; a worker on a GPU is never
        forked, and may use its devices. `start_call`: of a backend that answers requests; runs what its models call, on
        the data plane's thread. `content`: a digest of the files that are loaded; "" = the workers are not kept for
        another server."""
        self.events = events
        self.launcher = launcher
        self.mail = mail
        self.log = log
        self.policy = policy
        self.start_call = start_call
        self.limits = limits
        self.content = content
        self.name = f"model '{load.model_name}' version {load.version}"
        self.inputs = SharedHeap(f"rocserve:{load.model_name}", HEAP_BYTES)
        """Where the inputs of requests are put for all workers."""
        self.restarts = 0
        """How often a worker had to be started again."""
        self._down: set[int] = set()
        self._progress: dict[int, str] = {}
        self._silent: dict[int, Sequence[float]] = {}
        self._count = len(plans)
        self._instance_count = sum(plan.instance_count for plan in plans)
        self._log_allowance = Allowance(_BURST_LINES, _LINES_A_SECOND)
        self._supervisors = [WorkerSupervisor(self, index, plan, load, options) for index, plan in enumerate(plans)]

    @property
    def instances(self) -> Sequence[Instance]:
        """All instances that take batches now; none before `warm_up`."""
        return [
            instance for supervisor in self._supervisors for instance in supervisor.instances if not instance.closed
        ]

    @property
    def pids(self) -> Sequence[int]:
        """The process ids of the workers that run."""
        return list(self.models_of_workers)

    @property
    def models_of_workers(self) -> Mapping[int, int]:
        """How many models are in each worker, by its process id; one that has ended has none."""
        processes = (supervisor.process for supervisor in self._supervisors)
        return {process.pid: len(process.sessions) for process in processes if process is not None and process.sessions}

    async def load(self) -> Signature:
        """Start all workers beside each other. After a failure, or when cancelled, none is left running. Raises:
        ServeError: the first failure's reason."""
        signatures = await self._all_or_none([supervisor.load() for supervisor in self._supervisors])
        return signatures[0]

    async def warm_up(self, config: ModelConfig, config_json: str = "") -> None:
        """Warm all workers up with the completed config; their instances open as they are ready. After a failure, or
        when cancelled, none is left running. `config_json`: for backends that answer requests. Raises: ServeError: the
        first failure's reason."""
        message = WarmUp(config, config_json)
        await self._all_or_none([supervisor.warm_up(message) for supervisor in self._supervisors])

    async def stop(self, grace_seconds: float, reason: str = "") -> None:
        """End all workers after the batches that they have; kill those that take longer than `grace_seconds`.
        `reason`: the error of the requests that are then inside."""
        await asyncio.gather(*(supervisor.stop(grace_seconds, reason) for supervisor in self._supervisors))
        # They know the group: this way all of it goes at once, without the garbage collector.
        self._supervisors.clear()
        self.events, self.start_call = WorkerGroupEvents(), None
        self.mail.let_go(self.inputs)

    async def _all_or_none(self, steps: Sequence[Coroutine[Any, Any, _Result]]) -> list[_Result]:
        tasks = [asyncio.ensure_future(step) for step in steps]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(supervisor.kill() for supervisor in self._supervisors))
            self.mail.let_go(self.inputs)
            raise

    def worker_down(self, index: int, reason: str, delay_seconds: float) -> None:
        """A worker has to be started again."""
        self.restarts += index not in self._down
        self._down.add(index)
        self.events.restarting(reason, delay_seconds)

    def worker_up(self, index: int) -> None:
        """A worker that was down serves again."""
        self._down.discard(index)
        if not self._down:
            self.events.recovered()

    def worker_progress(self, index: int, text: str) -> None:
        """What a worker's engine is at now."""
        before = self._progress_line()
        phases = {_phase(line) for line in self._progress.values()}
        self._progress[index] = text
        if text and _phase(text) not in phases and self._log_allowance.take():
            self.log.info("%s: %s", self.name, text)
        line = self._progress_line()
        if line != before:
            self.events.progress(line)

    def worker_silent(self, index: int, seconds: Sequence[float]) -> None:
        """For how long each silent instance of a worker has been so."""
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
        """Workers that do the same are named together."""
        by_text: dict[str, list[int]] = {}
        for index, text in sorted(self._progress.items()):
            if text:
                by_text.setdefault(text, []).append(index + 1)
        if self._count == 1:
            return next(iter(by_text), "")
        parts = [f"{_workers(numbers)} of {self._count}: {text}" for text, numbers in by_text.items()]
        more = f"; {len(parts) - _MOST_PARTS} more" if len(parts) > _MOST_PARTS else ""
        return "; ".join(parts[:_MOST_PARTS]) + more


def _phase(text: str) -> str:
    """What stays the same while one thing goes on: the log has a line for each, not for each second of it."""
    return _MEASURE.sub("", text)


def _workers(numbers: Sequence[int]) -> str:
    return f"worker {numbers[0]}" if len(numbers) == 1 else f"workers {', '.join(map(str, numbers))}"
