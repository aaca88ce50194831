"""Starts, loads, watches, restarts and stops the workers of one model version, and reports what they are doing."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from rocserve.core.backoff import Backoff
from rocserve.core.custom_metrics import MetricChanges
from rocserve.core.errors import internal, unavailable
from rocserve.core.load_check import LoadCheckReport, merged
from rocserve.core.model_config import ModelConfig
from rocserve.core.requests import Signature
from rocserve.links.opening import HEAP_BYTES
from rocserve.observability.failures import Allowance
from rocserve.observability.log_fields import about
from rocserve.plane.heap import SharedHeap
from rocserve.settings import NO_TIME_LIMITS, TimeLimits
from rocserve.workers.answer_watch import AnswerWatch, process_state
from rocserve.workers.instance import Instance, InstanceMail
from rocserve.workers.instance_requests import CallStarter, RequestInstance
from rocserve.workers.launcher import WorkerLauncher
from rocserve.workers.load_limit import LoadLimit
from rocserve.workers.messages import Progress, Verbosity, WarmUp
from rocserve.workers.own_check import OwnCheck
from rocserve.workers.process import WorkerSession
from rocserve.workers.progress_lines import phase_of, progress_line, silence_line
from rocserve.workers.worker import Worker

_Result = TypeVar("_Result")


RESTARTS = Backoff(first_seconds=0.1, longest_seconds=30.0)
"""The delays of restarts in a row; the first restart is immediate. Restarts never stop."""


class VersionWorkers:
    """Manages the workers of one model version. Lives on the asyncio loop; properties may be read from any thread. A
    subclass overrides the events that it needs."""

    def __init__(
        self,
        workers: Sequence[Worker],
        *,
        launcher: WorkerLauncher,
        mail: InstanceMail,
        log: logging.Logger,
        backoff: Backoff = RESTARTS,
        start_call: CallStarter | None = None,
        limits: TimeLimits = NO_TIME_LIMITS,
        reported: set[str] | None = None,
        is_ours: bool = False,
    ) -> None:
        """`start_call`: runs the model's calls, on the data plane's thread; only for a backend that answers requests.
        `reported`: what loads of the same files have logged. `is_ours`: see Instance."""
        load, options = workers[0].load, workers[0].options
        self.name = f"model '{load.model_name}' version {load.version}"
        self.mail = mail
        self.inputs = SharedHeap(f"rocserve:{load.model_name}", HEAP_BYTES, mail.plane.work_off_later)
        self.restarts = 0
        self._launcher = launcher
        self._log = log
        self._backoff = backoff
        self._start_call = start_call
        self._is_ours = is_ours
        self._limits = limits
        self._reported = set() if reported is None else reported
        self._fields = about(model=load.model_name, version=load.version)
        self._output_prefix = options.output_prefix
        self._loop = asyncio.get_running_loop()
        self._own_check = OwnCheck(self.name, lambda: self._sessions, log)
        # Bounds lines of progress in the log; an engine has a handful of phases.
        self._log_allowance = Allowance(100, 10)
        self._workers = [*workers]

    @property
    def _sessions(self) -> Sequence[WorkerSession]:
        # Other threads call this too, so a session may end at any moment.
        return [session for session in [worker.session for worker in self._workers] if session is not None]

    @property
    def instances(self) -> Sequence[Instance]:
        """Instances that take batches now: none of a worker that has not warmed up yet."""
        return [instance for session in self._sessions for instance in session.instances if instance.takes_batches]

    @property
    def load_check(self) -> LoadCheckReport:
        """The findings of the workers' checks of the model, each once."""
        return merged(worker.load_check for worker in self._workers)

    @property
    def models_of_workers(self) -> Mapping[int, int]:
        """Number of models in each worker process that still runs, by process id."""
        processes = (session.process for session in self._sessions)
        return {process.pid: len(process.sessions) for process in processes if process.sessions}

    @property
    def own_check(self) -> OwnCheck | None:
        """Asks the model whether it is ready; None = the model has no such check, or no worker."""
        return self._own_check if any(session.checks_readiness for session in self._sessions) else None

    @property
    def troubles(self) -> str:
        """Which workers are restarting or silent, and their engines' background work; "" = nothing."""
        down = next((worker.down_reason for worker in tuple(self._workers) if worker.down_reason), "")
        restart = f"restarting: {down}" if down else ""
        return "; ".join(filter(None, (restart, self._silence_line, self._progress_line)))

    # Events, on the asyncio loop

    def instance_opened(self, instance: Instance) -> None:
        """The instance takes batches from now on."""

    def instance_lost(self, instance: Instance) -> None:
        """The instance's worker has ended. The batches in it fail right after this call."""

    def restarting(self, reason: str, delay_seconds: float) -> None:
        """A worker has ended, or could not be restarted. It is started after the delay."""

    def recovered(self) -> None:
        """All workers run again."""

    def progress(self, text: str, is_check: bool) -> None:
        """The current work of the workers' engines, in one line; "" = none. Also called during the load. `is_check`:
        they check the model."""

    def described(self, properties: Mapping[str, str]) -> None:
        """The engines have described the model."""

    def measured(self, changes: MetricChanges) -> None:
        """The model has changed its own metrics."""

    # All workers

    async def load(self) -> Signature:
        """Start all workers at the same time. After a failure or a cancellation none is left. Raises ServeError."""
        signatures = await self._all_or_none([self._load(worker) for worker in self._workers])
        # Workers on different devices may find different dependencies between rows.
        return next((signature for signature in signatures if signature.dependent_rows), signatures[0])

    async def warm_up(self, config: ModelConfig, config_json: str = "", recorded_answers: str = "") -> None:
        """Warm up all workers with the completed config. Then they serve and are restarted; an instance opens when its
        worker is ready. After a failure or a cancellation no worker is left. `config_json`: for backends that answer
        requests. `recorded_answers`: as in WarmUp. Raises ServeError."""
        message = WarmUp(config, config_json, recorded_answers)
        await self._all_or_none([self._begin_serving(worker, message) for worker in self._workers])

    async def stop(self, grace_seconds: float, reason: str = "") -> None:
        """End all workers after their batches, or after `grace_seconds`. `reason`: the error of requests lost then."""
        await asyncio.gather(*(self._stop(worker, grace_seconds, reason) for worker in self._workers))
        # Breaks a cycle that only a garbage collection would free.
        self._workers.clear()
        self._own_check = OwnCheck(self.name, tuple, self._log)
        self._start_call = None
        self.mail.close_heap(self.inputs)

    async def _all_or_none(self, steps: Sequence[Coroutine[Any, Any, _Result]]) -> list[_Result]:
        tasks = [asyncio.ensure_future(step) for step in steps]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for worker in self._workers:
                await _end_supervision(worker)
                self._discard(worker)
            self.mail.close_heap(self.inputs)
            raise

    # One worker

    async def _load(self, worker: Worker) -> Signature:
        """Load the model in a new process, or session. Cleans up on failure. Raises ServeError."""
        session = await self._launch(worker)
        worker.limit = LoadLimit(self._limits.load_timeout_seconds)
        session.send(Verbosity(self._log.isEnabledFor(logging.DEBUG)))
        async with self._limited(worker, session):
            loaded = await session.load(worker.load, functools.partial(self._reports, worker, session))
        for instance in session.instances:
            instance.batches_at_once = loaded.batches_at_once
        self.described(loaded.properties)
        worker.load_check = loaded.load_check
        return loaded.signature

    async def _launch(self, worker: Worker) -> WorkerSession:
        """Raises ServeError."""
        instances: list[Instance] = []
        plan = worker.load.plan
        shared = (
            worker.load.model_name,
            self.mail,
            self.inputs,
            self._instance_broken,
            self._log,
            plan.device,
            plan.rate_limiter,
        )
        starter = self._start_call
        make = Instance if starter is None else functools.partial(RequestInstance, start_call=starter)
        try:
            for name in plan.names:
                instances.append(make(*shared, name, self._is_ours))
            worker.session = session = await self._launcher.launch(worker.options, instances, self._log)
        except BaseException as error:
            for instance in instances:
                instance.peer.close()
            self._end_instances(instances, f"the worker of {self.name} was not started")
            if isinstance(error, OSError):
                raise internal(f"the worker of {self.name} cannot be started: {error}") from error
            raise
        session.on_trace = self._log_trace
        return session

    async def _begin_serving(self, worker: Worker, message: WarmUp) -> None:
        await self._warm_up(worker, message)
        worker.load = replace(worker.load, config=message.config)
        # The file may change while the version serves, which must not end it when its worker restarts.
        restart = replace(message, recorded_answers="")
        worker.supervision = self._loop.create_task(self._supervise(worker, restart))

    async def _warm_up(self, worker: Worker, message: WarmUp) -> None:
        """Cleans up on failure. Raises ServeError."""
        session = worker.session
        if session is None:
            raise unavailable(f"{self.name} has no worker")
        async with self._limited(worker, session):
            worker.load_check = worker.load_check.then(await session.warm_up(message))
        for instance in session.instances:
            self.instance_opened(instance)

    @contextlib.asynccontextmanager
    async def _limited(self, worker: Worker, session: WorkerSession) -> AsyncIterator[None]:
        try:
            async with worker.limit.bounding():
                yield
        except TimeoutError:
            self._discard(worker)
            seconds = self._limits.load_timeout_seconds
            text = f"the worker did not load within {seconds:g} s (load_timeout_secs) and was ended"
            raise unavailable(text + session.process.last_words) from None
        except BaseException:
            self._discard(worker)
            raise

    def _discard(self, worker: Worker) -> None:
        session, worker.session = worker.session, None
        if session is not None:
            session.kill()
            self._note_progress(worker, "")
            self._end_instances(session.instances, f"the worker of {self.name} was stopped")

    async def _stop(self, worker: Worker, grace_seconds: float, reason: str) -> None:
        """See `stop`."""
        await _end_supervision(worker)
        if (session := worker.session) is not None:
            if not await session.unload(grace_seconds) and grace_seconds:
                self._log.warning(
                    "the worker of %s did not stop within %g s of its unload and was killed; a Python model's finalize"
                    " may not have completed",
                    self.name,
                    grace_seconds,
                    extra=self._fields,
                )
            reason = reason or f"the worker of {self.name} was stopped"
            self._end_instances(session.instances, f"{reason}; the request was in it")
            worker.session = None

    async def _supervise(self, worker: Worker, message: WarmUp) -> None:
        """Restart the worker whenever it ends."""
        failures = 0
        try:
            while session := worker.session:
                ready_at = time.monotonic()
                await self._watch(worker, session)
                has_answered = any(instance.has_answered for instance in session.instances)
                # A worker is healthy if it has answered a batch, or served for a minute.
                if has_answered or time.monotonic() - ready_at >= 60.0:
                    failures = 0
                reason = self._lose(worker, session)
                while worker.session is None:
                    failures += 1
                    delay = self._backoff.pause_seconds(failures - 1)
                    self._note_down(worker, reason, delay)
                    await asyncio.sleep(delay)
                    try:
                        await self._load(worker)
                        await self._warm_up(worker, message)
                    except Exception as error:
                        # Any exception, because descriptors or memory may be short for a while.
                        self._discard(worker)
                        reason = str(error) or type(error).__name__
                        self._log.error("%s could not be restarted: %s", self.name, reason, extra=self._fields)
                self._log.info("%s has a worker again", self.name, extra=self._fields)
                self._note_up(worker)
        except Exception:
            self._log.critical("%s is no longer supervised", self.name, exc_info=True, extra=self._fields)

    async def _watch(self, worker: Worker, session: WorkerSession) -> None:
        """Wait until the worker has ended. A worker that hangs is killed, with all models that share its process."""
        process, name = session.process, f"{self.name}: " if worker.options.shared_worker else ""
        watch = AnswerWatch(
            session.instances,
            self._limits,
            functools.partial(process_state, process.pid),
            functools.partial(self._note_silence, worker),
            lambda reason: process.end_because(name + reason, exceeds_limit=True),
        )
        try:
            await session.ended.wait()
        finally:
            watch.stop()

    def _lose(self, worker: Worker, session: WorkerSession) -> str:
        process = session.process
        text = f"{process.title} of {self.name} {process.end.description}"
        self._log.error("%s; it is being restarted", text, extra=self._fields)
        worker.session = None
        self._note_progress(worker, "")
        for instance in session.instances:
            instance.stop_taking()
            self.instance_lost(instance)
        self._end_instances(session.instances, f"{text}; the request was in it; the model is being restarted")
        return f"{process.title} {process.end.description}"

    def _end_instances(self, instances: Sequence[Instance], text: str) -> None:
        for instance in instances:
            self.mail.plane.call_soon(functools.partial(instance.end, unavailable(text)))

    def _instance_broken(self, instance: Instance, reason: str) -> None:
        """On the data plane's thread."""

        def report() -> None:
            for session in self._sessions:
                if instance in session.instances:
                    session.instance_broken(reason)

        self._loop.call_soon_threadsafe(report)

    # Progress

    def _note_down(self, worker: Worker, reason: str, delay_seconds: float) -> None:
        self.restarts += not worker.down_reason
        worker.down_reason = reason
        self.restarting(reason, delay_seconds)

    def _note_up(self, worker: Worker) -> None:
        worker.down_reason = ""
        if not any(worker.down_reason for worker in self._workers):
            self.recovered()

    def _reports(self, worker: Worker, session: WorkerSession, report: Progress | MetricChanges) -> None:
        if session is not worker.session:
            return
        if isinstance(report, MetricChanges):
            self.measured(report)
            return
        # A check bounds its own time, but a hanging engine does not keep that bound.
        worker.limit.note("" if report.is_check else report.text)
        self._note_progress(worker, report.text, report.is_check)
        if report.properties:
            self.described(report.properties)

    def _note_progress(self, worker: Worker, text: str, is_check: bool = False) -> None:
        before = self._progress_line, self._is_checking
        # The log gets a line for each new phase, not for each change of its numbers.
        phases = {phase_of(worker.progress) for worker in self._workers}
        worker.progress, worker.is_checking = text, is_check
        if text and phase_of(text) not in phases and self._log_allowance.take():
            # The line at the end of a check is enough.
            level = logging.DEBUG if is_check else logging.INFO
            self._log.log(level, "%s: %s", self.name, text, extra=self._fields)
        after = self._progress_line, self._is_checking
        if after != before:
            self.progress(*after)

    @property
    def _is_checking(self) -> bool:
        """Whether some workers check their model, and the others report nothing."""
        checking = [worker.is_checking for worker in self._workers if worker.is_checking or worker.progress]
        return bool(checking) and all(checking)

    @property
    def _progress_line(self) -> str:
        return progress_line([worker.progress for worker in self._workers])

    @property
    def _silence_line(self) -> str:
        workers = tuple(self._workers)
        silent = [seconds for worker in workers for seconds in worker.silent_seconds]
        return silence_line(silent, sum(worker.load.plan.instance_count for worker in workers))

    def _note_silence(self, worker: Worker, seconds: Sequence[float]) -> None:
        worker.silent_seconds = seconds

    def _log_trace(self, trace: str) -> None:
        """Log a traceback once: other workers, and later loads of the same files, fail at the same lines."""
        lines = trace.splitlines()
        place = "\n".join(line for line in lines if line.startswith("  File ")) or trace
        if place not in self._reported:
            self._reported.add(place)
            for line in lines:
                self._log.error("%s%s", self._output_prefix, line, extra=self._fields)


async def _end_supervision(worker: Worker) -> None:
    supervision, worker.supervision = worker.supervision, None
    if supervision is not None:
        supervision.cancel()
        await asyncio.wait((supervision,))
