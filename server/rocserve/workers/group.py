"""Loads, supervises and stops all workers of one model version, and restarts those that crash."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import logging
import math
import re
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from rocserve.core.backoff import Backoff
from rocserve.core.custom_metrics import MetricChanges
from rocserve.core.errors import ServeError, internal, unavailable
from rocserve.core.model_config import InstanceKind, ModelConfig
from rocserve.core.plain import to_json
from rocserve.core.requests import Signature
from rocserve.observability.failures import Allowance
from rocserve.plane.heap import SharedHeap
from rocserve.settings import NO_TIME_LIMITS, TimeLimits
from rocserve.workers.answer_watch import AnswerWatch, process_state
from rocserve.workers.instance import HEAP_BYTES, Instance, InstanceMail
from rocserve.workers.instance_requests import CallStarter
from rocserve.workers.launcher import WorkerLauncher
from rocserve.workers.messages import LaunchOptions, Load, Progress, Verbosity, WarmUp, WorkerPlan
from rocserve.workers.own_check import OwnCheck
from rocserve.workers.process import WorkerSession

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
_HEALTHY_SECONDS = 60.0
"""A worker that served this long, or answered a batch, resets the count of failures."""


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

    def progress(self, text: str) -> None:
        """What the workers' engines are doing, in one line; "" = nothing. Also called during the load."""

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
        content: str = "",
        reported: set[str] | None = None,
    ) -> None:
        """`options`: for workers on the CPU; a worker on a GPU is never forked, and may also use the GPU's devices.
        `start_call`: runs the model's calls, on the data plane's thread; only for a backend that answers requests.
        `content`: digest of the loaded files; "" = the workers are not kept for the next server. `reported`: what loads
        of the same files have logged."""
        self.events = events
        self.launcher = launcher
        self.mail = mail
        self.log = log
        self.backoff = backoff
        self.start_call = start_call
        self.limits = limits
        self.content = content
        self._reported = set() if reported is None else reported
        self._output_prefix = options.output_prefix
        self.name = f"model '{load.model_name}' version {load.version}"
        self.inputs = SharedHeap(f"rocserve:{load.model_name}", HEAP_BYTES, mail.plane.work_off_later)
        self.restarts = 0
        self._own_check = OwnCheck(self.name, lambda: self._workers, log)
        self._down: set[int] = set()
        self._progress: dict[int, str] = {}
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
        return signatures[0]

    async def warm_up(self, config: ModelConfig, config_json: str = "") -> None:
        """Warm up all workers with the completed config; an instance opens when its worker is ready. After a failure or
        a cancellation no worker is left. `config_json`: for backends that answer requests. Raises ServeError."""
        message = WarmUp(config, config_json)
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

    def worker_progress(self, index: int, text: str) -> None:
        before = self._progress_line()
        # The log gets a line for each new phase, not for each change of its numbers.
        phases = {_MEASURE.sub("", line) for line in self._progress.values()}
        self._progress[index] = text
        if text and _MEASURE.sub("", text) not in phases and self._log_allowance.take():
            self.log.info("%s: %s", self.name, text)
        line = self._progress_line()
        if line != before:
            self.events.progress(line)

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


_TAKE_OVER_SECONDS = 10.0
"""A worker of the previous server may still run that server's batch; after this time it is ended."""


class LoadLimit:
    """Bounds the time in which a worker loads and warms up its model. Time in which the engine reports progress is not
    counted, because engines report compiling, which has separate limits."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: 0 = no limit."""
        self._left = seconds or math.inf
        self._timeout: asyncio.Timeout | None = None
        self._compiles = False
        self._counted_from: float | None = None

    @contextlib.asynccontextmanager
    async def bounding(self) -> AsyncIterator[None]:
        """Bound a part of the load. Raises TimeoutError if the time is over; later parts fail immediately then."""
        async with asyncio.timeout(None) as self._timeout:
            self._count(not self._compiles)
            try:
                yield
            finally:
                self._count(False)
                self._timeout = None

    def note(self, doing: str) -> None:
        self._compiles = bool(doing)
        self._count(not self._compiles)

    def _count(self, counts: bool) -> None:
        if self._timeout is None:
            return
        now = asyncio.get_running_loop().time()
        if self._counted_from is not None:
            self._left = max(0.0, self._left - (now - self._counted_from))
        self._counted_from = now if counts else None
        if not self._timeout.expired():
            self._timeout.reschedule(now + self._left if counts and self._left < math.inf else None)


class WorkerSupervisor:
    """Starts, watches and restarts one worker until it is stopped."""

    def __init__(self, group: WorkerGroup, index: int, plan: WorkerPlan, load: Load, options: LaunchOptions) -> None:
        self._group = group
        self._index = index
        self._load = dataclasses.replace(load, plan=plan, model_file=plan.model_file or load.model_file)
        # A GPU library reads the variable when it is loaded, so the device is chosen before the process starts.
        has_gpus = plan.device is not None or plan.kind is InstanceKind.MODEL
        self._options = options.on_gpus(plan.device) if has_gpus else options
        self._key = ""
        """Equal for workers that have loaded the same files with the same settings; "" = the worker is not kept."""
        if group.content:
            parts = (to_json(self._load), to_json(self._options), group.content.encode())
            self._key = hashlib.blake2b(b"\0".join(parts), digest_size=16).hexdigest()
        self._load_limit = LoadLimit(group.limits.load_timeout_seconds)
        self._log = group.log
        self._name = group.name
        self._loop = asyncio.get_running_loop()
        self.worker: WorkerSession | None = None
        self._supervision: asyncio.Task[None] | None = None

    async def load(self) -> Signature:
        """Load the model in a new worker, or in one of the previous server. Cleans up on failure. Raises ServeError."""
        worker = await self._launch()
        if worker.process.was_left and not self._options.shared_worker:
            try:
                async with asyncio.timeout(_TAKE_OVER_SECONDS):
                    return await self._load_in(worker)
            except (ServeError, TimeoutError) as error:
                reason = str(error) or f"it has not answered within {_TAKE_OVER_SECONDS:g} s"
                self._log.warning("the worker of %s that was left could not be taken over: %s", self._name, reason)
            worker = await self._launch()
        return await self._load_in(worker)

    async def _launch(self) -> WorkerSession:
        """Raises ServeError."""
        instances: list[Instance] = []
        group, plan = self._group, self._load.plan
        shared = (self._load.model_name, group.mail, group.inputs, self._instance_broken, self._log, group.start_call)
        try:
            for _ in range(plan.instance_count):
                instances.append(Instance(*shared, plan.device, plan.rate_limiter))
            self.worker = await group.launcher.launch(self._options, instances, self._log, self._key)
        except BaseException as error:
            for instance in instances:
                instance.peer.close()
            self._end_instances(instances, f"the worker of {self._name} was not started")
            if isinstance(error, OSError):
                raise internal(f"the worker of {self._name} cannot be started: {error}") from error
            raise
        self.worker.on_trace = group.worker_trace
        return self.worker

    async def _load_in(self, worker: WorkerSession) -> Signature:
        self._load_limit = LoadLimit(self._group.limits.load_timeout_seconds)
        worker.send(Verbosity(self._log.isEnabledFor(logging.DEBUG)))
        async with self._limited_load(worker):
            loaded = await worker.load(self._load, functools.partial(self._progress, worker))
        if loaded.was_kept:
            self._log.info("%s is still loaded", self._name)
        for instance in worker.instances:
            instance.batches_at_once = loaded.batches_at_once
        self._group.events.described(loaded.properties)
        return loaded.signature

    def _progress(self, worker: WorkerSession, progress: Progress | MetricChanges) -> None:
        if worker is not self.worker:
            return
        if isinstance(progress, MetricChanges):
            self._group.events.measured(progress)
            return
        self._load_limit.note(progress.text)
        self._group.worker_progress(self._index, progress.text)
        if progress.properties:
            self._group.events.described(progress.properties)

    async def warm_up(self, message: WarmUp) -> None:
        """Warm up the model; then the worker serves and is restarted. Cleans up on failure. Raises ServeError."""
        await self._warm_up(message)
        self._load = dataclasses.replace(self._load, config=message.config)
        self._supervision = self._loop.create_task(self._supervise(message))

    async def stop(self, grace_seconds: float, reason: str = "") -> None:
        """See WorkerGroup.stop."""
        await self._stop_supervision()
        if (worker := self.worker) is not None:
            if not await worker.unload(grace_seconds) and grace_seconds:
                self._log.warning(
                    "the worker of %s had not ended %g s after its unload began: what it was at, such as a Python"
                    " model's finalize, was broken off",
                    self._name,
                    grace_seconds,
                )
            reason = reason or f"the worker of {self._name} was stopped"
            self._end_instances(worker.instances, f"{reason}; the request was in it")
            self.worker = None

    async def kill(self) -> None:
        await self._stop_supervision()
        self._discard()

    async def _stop_supervision(self) -> None:
        supervision, self._supervision = self._supervision, None
        if supervision is not None:
            supervision.cancel()
            await asyncio.wait((supervision,))

    async def _warm_up(self, message: WarmUp) -> None:
        worker = self.worker
        if worker is None:
            raise unavailable(f"{self._name} has no worker")
        async with self._limited_load(worker):
            await worker.warm_up(message)
        for instance in worker.instances:
            self._group.events.instance_opened(instance)
        if self._key:
            self._group.launcher.keep(worker.process, self._options.shared_worker or self._key)

    @contextlib.asynccontextmanager
    async def _limited_load(self, worker: WorkerSession) -> AsyncIterator[None]:
        try:
            async with self._load_limit.bounding():
                yield
        except TimeoutError:
            self._discard()
            seconds = self._group.limits.load_timeout_seconds
            text = f"the worker did not load within {seconds:g} s (load_timeout_secs) and was ended"
            raise unavailable(text + worker.process.last_words) from None
        except BaseException:
            self._discard()
            raise

    def _discard(self) -> None:
        worker, self.worker = self.worker, None
        if worker is not None:
            worker.kill()
            self._group.worker_progress(self._index, "")
            self._end_instances(worker.instances, f"the worker of {self._name} was stopped")

    async def _supervise(self, message: WarmUp) -> None:
        failures = 0
        try:
            while worker := self.worker:
                ready_at = time.monotonic()
                await self._watch(worker)
                has_answered = any(instance.has_answered for instance in worker.instances)
                if has_answered or time.monotonic() - ready_at >= _HEALTHY_SECONDS:
                    failures = 0
                reason = self._lose(worker)
                while self.worker is None:
                    failures += 1
                    delay = self._group.backoff.pause_seconds(failures - 1)
                    self._group.worker_down(self._index, reason, delay)
                    await asyncio.sleep(delay)
                    try:
                        await self.load()
                        await self._warm_up(message)
                    except Exception as error:
                        # Any exception, because descriptors or memory may be short for a while.
                        self._discard()
                        reason = str(error)
                        self._log.error("%s could not be restarted: %s", self._name, reason)
                self._log.info("%s has a worker again", self._name)
                self._group.worker_up(self._index)
        except Exception:
            self._log.critical("%s is no longer supervised", self._name, exc_info=True)

    async def _watch(self, worker: WorkerSession) -> None:
        """Wait until the worker has ended. A worker that hangs is killed, with all models that share its process."""
        process, name = worker.process, f"{self._name}: " if self._options.shared_worker else ""
        watch = AnswerWatch(
            worker.instances,
            self._group.limits,
            functools.partial(process_state, process.pid),
            functools.partial(self._group.worker_silent, self._index),
            lambda reason: process.end_because(name + reason, exceeds_limit=True),
        )
        try:
            await worker.ended.wait()
        finally:
            watch.stop()

    def _lose(self, worker: WorkerSession) -> str:
        process = worker.process
        text = f"{process.title} of {self._name} {process.end.description}"
        self._log.error("%s; it is being restarted", text)
        self.worker = None
        self._group.worker_progress(self._index, "")
        for instance in worker.instances:
            instance.stop_taking()
            self._group.events.instance_lost(instance)
        self._end_instances(worker.instances, f"{text}; the request was in it; the model is being restarted")
        return f"{process.title} {process.end.description}"

    def _end_instances(self, instances: Sequence[Instance], text: str) -> None:
        for instance in instances:
            self._group.mail.plane.call_soon(functools.partial(instance.end, unavailable(text)))

    def _instance_broken(self, instance: Instance, reason: str) -> None:
        """On the data plane's thread."""

        def report() -> None:
            if self.worker is not None and instance in self.worker.instances:
                self.worker.instance_broken(reason)

        self._loop.call_soon_threadsafe(report)
