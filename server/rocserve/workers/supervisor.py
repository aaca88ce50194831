"""Keeps one worker of a model version alive."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rocserve.core.custom_metrics import MetricChanges
from rocserve.core.errors import ServeError, internal, unavailable
from rocserve.core.plain import to_json
from rocserve.core.requests import Signature
from rocserve.workers.answer_watch import AnswerWatch, process_state
from rocserve.workers.instance import Instance
from rocserve.workers.messages import LaunchOptions, Load, Progress, WarmUp, WorkerPlan
from rocserve.workers.process import WorkerProcess, WorkerSession

if TYPE_CHECKING:
    from rocserve.workers.group import WorkerGroup

_TAKE_OVER_SECONDS = 10.0
"""A worker that the server before has left may still be at what that has sent it; with a longer batch it is ended."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How long to wait before a worker that ended is started again. Never gives up."""

    first_delay_seconds: float = 0.1
    """Before the second restart in a row; the first is immediate, each further delay is twice the last."""
    longest_delay_seconds: float = 30.0
    healthy_seconds: float = 60.0
    """A worker that served this long, or answered a batch, starts the count anew."""

    def delay(self, failures: int) -> float:
        """Seconds before the restart that follows the `failures`th failure in a row."""
        if failures <= 1:
            return 0.0
        return min(self.first_delay_seconds * 2.0 ** min(failures - 2, 60), self.longest_delay_seconds)


DEFAULT_POLICY = RestartPolicy()


class LoadLimit:
    """Bounds the time that a worker takes to load its model and to warm it up.

    Not counted is the time in which the engine says that it compiles: that has limits of its own.
    """

    def __init__(self, seconds: float) -> None:
        """`seconds`: 0 = no limit."""
        self._left = seconds or None
        self._timeout: asyncio.Timeout | None = None
        self._compiles = False
        self._since = 0.0

    @contextlib.asynccontextmanager
    async def bounding(self) -> AsyncIterator[None]:
        """A part of the load. Raises: TimeoutError, the time is over; so it is for what follows."""
        async with asyncio.timeout(None) as self._timeout:
            self._go_on()
            try:
                yield
            finally:
                self._pause()
                self._timeout = None

    def note(self, doing: str) -> None:
        """The engine says what it is at; "" = nothing that takes long."""
        self._pause()
        self._compiles = bool(doing)
        self._go_on()

    def _go_on(self) -> None:
        self._since = asyncio.get_running_loop().time()
        if self._timeout is not None and self._left is not None and not self._compiles:
            self._timeout.reschedule(self._since + self._left)

    def _pause(self) -> None:
        if self._timeout is None or self._left is None or self._compiles or self._timeout.expired():
            return
        self._left = max(0.0, self._left - (asyncio.get_running_loop().time() - self._since))
        self._timeout.reschedule(None)


class WorkerSupervisor:
    """One worker: started, watched and restarted until it is stopped."""

    def __init__(self, group: WorkerGroup, index: int, plan: WorkerPlan, load: Load, options: LaunchOptions) -> None:
        """`group`: takes all that happens to this worker of it, the one with this index."""
        self._group = group
        self._index = index
        self._load = dataclasses.replace(load, plan=plan, model_file=plan.model_file or load.model_file)
        # A GPU library looks at the variable when it is loaded, so the device is chosen before the process starts.
        self._options = options if plan.device is None else options.on_gpu(plan.device)
        self._key = _key(self._load, self._options, group.content) if group.content else ""
        self._launcher = group.launcher
        self._events = group.events
        self._load_limit = LoadLimit(group.limits.load_seconds)
        self._log = group.log
        self._name = group.name
        self._loop = asyncio.get_running_loop()
        self._worker: WorkerSession | None = None
        self._supervision: asyncio.Task[None] | None = None

    @property
    def instances(self) -> Sequence[Instance]:
        """Those of the worker that now serves; empty while there is none."""
        worker = self._worker
        return worker.instances if worker is not None else ()

    @property
    def process(self) -> WorkerProcess | None:
        """None while there is none."""
        return self._worker.process if self._worker is not None else None

    async def load(self) -> Signature:
        """Start the worker and load the model, or take over one that has loaded it; after a failure or a cancellation
        nothing is left. Raises: ServeError: the reason why it cannot be loaded."""
        try:
            async with asyncio.timeout(_TAKE_OVER_SECONDS):
                is_held = self._key and not self._options.shared_worker
                process = await self._launcher.take_over(self._key, self._options, self._log) if is_held else None
                if process is not None:
                    return await self._load_by(process)
        except (ServeError, TimeoutError) as error:
            reason = str(error) or f"it has not answered within {_TAKE_OVER_SECONDS:g} s"
            self._log.warning("the worker of %s that was left could not be taken over: %s", self._name, reason)
        return await self._load_by()

    async def _load_by(self, process: WorkerProcess | None = None) -> Signature:
        """`process`: None: another one is started."""
        instances: list[Instance] = []
        self._load_limit = LoadLimit(self._group.limits.load_seconds)
        try:
            for _ in range(self._load.plan.instance_count):
                instances.append(self._new_instance())
            if process is not None:
                self._worker = await WorkerSession.open(process, instances)
            else:
                self._worker = await self._launcher.launch(self._options, instances, self._log, self._key)
        except BaseException as error:
            if process is not None:
                process.kill()
            for instance in instances:
                instance.take_peer().close()
            self._end_instances(instances, f"the worker of {self._name} was not started")
            if isinstance(error, OSError):
                raise internal(f"the worker of {self._name} cannot be started: {error}") from error
            raise
        worker = self._worker
        async with self._limited_load(worker):
            loaded = await worker.load(self._load, functools.partial(self._progress, worker))
        if loaded.was_kept:
            self._log.info("%s is still loaded", self._name)
        for instance in worker.instances:
            instance.batches_at_once = loaded.batches_at_once
        self._events.described(loaded.properties)
        return loaded.signature

    def _progress(self, worker: WorkerSession, progress: Progress | MetricChanges) -> None:
        if worker is not self._worker:
            return
        if isinstance(progress, MetricChanges):
            self._events.measured(progress)
            return
        self._load_limit.note(progress.text)
        self._group.worker_progress(self._index, progress.text)
        if progress.properties:
            self._events.described(progress.properties)

    def _new_instance(self) -> Instance:
        return Instance(
            self._load.model_name,
            self._group.mail,
            self._group.inputs,
            self._instance_broken,
            self._log,
            self._group.start_call,
            self._load.plan.device,
            self._load.plan.rate_limiter,
        )

    async def warm_up(self, message: WarmUp) -> None:
        """Warm the model up; from then on the worker serves, and is restarted when it ends. Raises: ServeError: the
        reason why it cannot be warmed up; the worker has been ended."""
        await self._warm_up(message)
        self._load = dataclasses.replace(self._load, config=message.config)
        self._supervision = self._loop.create_task(self._supervise(message))
        self._supervision.add_done_callback(self._supervision_ended)

    async def stop(self, grace_seconds: float, reason: str = "") -> None:
        """End the worker after its batches; kill it after `grace_seconds`. `reason`: see WorkerGroup.stop."""
        await self._stop_supervision()
        worker = self._worker
        if worker is not None:
            await worker.unload(grace_seconds)
            reason = reason or f"the worker of {self._name} was stopped"
            self._end_instances(worker.instances, f"{reason}; the request was in it")
            self._worker = None

    async def kill(self) -> None:
        """End the worker at once."""
        await self._stop_supervision()
        self._discard()

    async def _stop_supervision(self) -> None:
        supervision, self._supervision = self._supervision, None
        if supervision is not None:
            supervision.cancel()
            await asyncio.wait((supervision,))

    async def _warm_up(self, message: WarmUp) -> None:
        worker = self._worker
        if worker is None:
            raise unavailable(f"{self._name} has no worker")
        async with self._limited_load(worker):
            await worker.warm_up(message)
        for instance in worker.instances:
            self._events.instance_opened(instance)
        if self._key:
            self._launcher.keep(worker.process, self._options.shared_worker or self._key)

    @contextlib.asynccontextmanager
    async def _limited_load(self, worker: WorkerSession) -> AsyncIterator[None]:
        """A part of the load within its time; the worker is ended when it fails."""
        try:
            async with self._load_limit.bounding():
                yield
        except TimeoutError:
            self._discard()
            seconds = self._group.limits.load_seconds
            text = f"the worker did not load within {seconds:g} s (load_timeout_secs) and was ended"
            raise unavailable(text + worker.process.last_words) from None
        except BaseException:
            self._discard()
            raise

    def _discard(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()
            self._group.worker_progress(self._index, "")
            self._end_instances(worker.instances, f"the worker of {self._name} was stopped")

    async def _supervise(self, message: WarmUp) -> None:
        failures = 0
        while True:
            worker = self._worker
            assert worker is not None
            ready_at = time.monotonic()
            watch = AnswerWatch(
                worker.instances,
                self._group.limits,
                functools.partial(process_state, worker.process.pid),
                functools.partial(self._group.worker_silent, self._index),
                functools.partial(self._hangs, worker),
            )
            try:
                await worker.wait()
            finally:
                watch.stop()
            has_answered = any(instance.has_answered for instance in worker.instances)
            if has_answered or time.monotonic() - ready_at >= self._group.policy.healthy_seconds:
                failures = 0
            self._lose(worker)
            failures = await self._restart(message, f"{worker.process.title} {worker.process.fate}", failures + 1)

    def _hangs(self, worker: WorkerSession, reason: str) -> None:
        """Its process is ended, and started again with all that it serves."""
        worker.process.end_for(f"{self._name}: {reason}" if self._options.shared_worker else reason)

    def _supervision_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.critical("%s is no longer supervised", self._name, exc_info=error)

    def _lose(self, worker: WorkerSession) -> None:
        text = f"{worker.process.title} of {self._name} {worker.process.fate}"
        self._log.error("%s; it is being restarted", text)
        self._worker = None
        self._group.worker_progress(self._index, "")
        reason = unavailable(f"{text}; the model is being restarted")
        for instance in worker.instances:
            instance.stop_taking()
            self._events.instance_lost(instance, reason)
        self._end_instances(worker.instances, f"{text}; the request was in it; the model is being restarted")

    async def _restart(self, message: WarmUp, reason: str, failures: int) -> int:
        """Until a worker serves again; how many failures there were in a row."""
        while True:
            delay = self._group.policy.delay(failures)
            self._group.worker_down(self._index, reason, delay)
            await asyncio.sleep(delay)
            try:
                await self.load()
                await self._warm_up(message)
            except Exception as error:
                # Not only what the engine says: descriptors or memory may be short, and come back.
                failures += 1
                reason = str(error)
                self._log.error("%s could not be restarted: %s", self._name, reason)
                continue
            self._log.info("%s has a worker again", self._name)
            self._group.worker_up(self._index)
            return failures

    def _end_instances(self, instances: Sequence[Instance], text: str) -> None:
        for instance in instances:
            self._group.mail.plane.call_soon(functools.partial(instance.end, unavailable(text)))

    def _instance_broken(self, instance: Instance, reason: str) -> None:
        """On the data plane's thread."""
        self._loop.call_soon_threadsafe(self._report_broken, instance, reason)

    def _report_broken(self, instance: Instance, reason: str) -> None:
        worker = self._worker
        if worker is not None and instance in worker.instances:
            worker.instance_broken(reason)


def _key(load: Load, options: LaunchOptions, content: str) -> str:
    """Two workers with the same key have loaded the same in the same way."""
    # What the log takes may change at any time.
    parts = (to_json(dataclasses.replace(load, verbose=False)), to_json(options), content.encode())
    return hashlib.blake2b(b"\0".join(parts), digest_size=16).hexdigest()
