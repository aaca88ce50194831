"""Starts, watches and restarts one worker of a model version."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import math
import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from rocserve.core.custom_metrics import MetricChanges
from rocserve.core.errors import internal, unavailable
from rocserve.core.load_check import NOT_CHECKED
from rocserve.core.model_config import InstanceKind
from rocserve.core.requests import Signature
from rocserve.workers.answer_watch import AnswerWatch, process_state
from rocserve.workers.instance import Instance
from rocserve.workers.messages import LaunchOptions, Load, Progress, Verbosity, WarmUp, WorkerPlan
from rocserve.workers.process import WorkerSession

if TYPE_CHECKING:
    from rocserve.workers.group import WorkerGroup

_HEALTHY_SECONDS = 60.0
"""A worker that served this long, or answered a batch, resets the count of failures."""


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
        self._load_limit = LoadLimit(group.limits.load_timeout_seconds)
        self._log = group.log
        self._name = group.name
        self._loop = asyncio.get_running_loop()
        self.worker: WorkerSession | None = None
        self.load_check = NOT_CHECKED
        self._supervision: asyncio.Task[None] | None = None

    async def load(self) -> Signature:
        """Load the model in a new worker. Cleans up on failure. Raises ServeError."""
        worker = await self._launch()
        self._load_limit = LoadLimit(self._group.limits.load_timeout_seconds)
        worker.send(Verbosity(self._log.isEnabledFor(logging.DEBUG)))
        async with self._limited_load(worker):
            loaded = await worker.load(self._load, functools.partial(self._progress, worker))
        for instance in worker.instances:
            instance.batches_at_once = loaded.batches_at_once
        self._group.events.described(loaded.properties)
        self.load_check = loaded.load_check
        return loaded.signature

    async def _launch(self) -> WorkerSession:
        """Raises ServeError."""
        instances: list[Instance] = []
        group, plan = self._group, self._load.plan
        shared = (self._load.model_name, group.mail, group.inputs, self._instance_broken, self._log, group.start_call)
        try:
            for _ in range(plan.instance_count):
                instances.append(Instance(*shared, plan.device, plan.rate_limiter))
            self.worker = await group.launcher.launch(self._options, instances, self._log)
        except BaseException as error:
            for instance in instances:
                instance.peer.close()
            self._end_instances(instances, f"the worker of {self._name} was not started")
            if isinstance(error, OSError):
                raise internal(f"the worker of {self._name} cannot be started: {error}") from error
            raise
        self.worker.on_trace = group.worker_trace
        return self.worker

    def _progress(self, worker: WorkerSession, progress: Progress | MetricChanges) -> None:
        if worker is not self.worker:
            return
        if isinstance(progress, MetricChanges):
            self._group.events.measured(progress)
            return
        # A check has its own bound, which a hanging engine does not keep.
        self._load_limit.note("" if progress.is_check else progress.text)
        self._group.worker_progress(self._index, progress.text, progress.is_check)
        if progress.properties:
            self._group.events.described(progress.properties)

    async def warm_up(self, message: WarmUp) -> None:
        """Warm up the model; then the worker serves and is restarted. Cleans up on failure. Raises ServeError."""
        await self._warm_up(message)
        self._load = dataclasses.replace(self._load, config=message.config)
        # The file may change while the version serves, which must not end it when its worker restarts.
        restart = dataclasses.replace(message, recorded_answers="")
        self._supervision = self._loop.create_task(self._supervise(restart))

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
            self.load_check = self.load_check.then(await worker.warm_up(message))
        for instance in worker.instances:
            self._group.events.instance_opened(instance)

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
