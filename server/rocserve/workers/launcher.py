"""Starts workers, through the zygote."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import os
import socket
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rocserve.core.errors import internal
from rocserve.settings import KEEP_USER, WorkerSettings
from rocserve.workers.control_groups import ControlGroup, ControlGroups
from rocserve.workers.instance import Instance
from rocserve.workers.isolation import Confinement, candidates, worker_environment
from rocserve.workers.messages import (
    Exited,
    Keep,
    Kept,
    KeptListed,
    LaunchOptions,
    ListKept,
    Spawn,
    Spawned,
    SpawnFailed,
)
from rocserve.workers.process import WorkerProcess, WorkerSession, kill
from rocserve.workers.resource_watch import ResourceWatch
from rocserve.workers.worker_output import WorkerOutput
from rocserve.workers.zygote_link import KeptWorkers, ZygoteLink, ZygoteProcess

_LAUNCH_ATTEMPTS = 3
_ANSWER_SECONDS = 60.0
"""How long the zygote may say nothing while a worker is waited for. It takes milliseconds for one; its imports, which
come first, take seconds, many on a machine that has much else to do."""


def _nothing(zygote: object) -> None:
    """Where the zygote ends with this process."""


@dataclass(slots=True)
class _Launch:
    """A worker that the zygote was asked for."""

    model_name: str
    settings: WorkerSettings
    """With the model's own bounds."""
    group: ControlGroup | None
    """Its cgroup, where the kernel keeps its bounds."""
    start: Callable[[int, int | None], WorkerProcess]
    """Takes its pid and pidfd."""
    worker: asyncio.Future[WorkerProcess]


class WorkerLauncher:
    """Keeps a zygote and starts workers through it.

    `start` needs no asyncio loop and is to be called before grpc is imported, so that the zygote gets the machine to
    itself while the server imports the rest; everything else runs on the loop. Should the zygote die, workers go on,
    and the next launch starts another. One that does not answer is killed.

    Zygote and workers outlive the server where somebody else holds their pipe, and the zygote's connection.
    """

    def __init__(
        self,
        preload: Sequence[str],
        log: logging.Logger,
        settings: WorkerSettings | None = None,
        groups: ControlGroups | None = None,
        answer_seconds: float = _ANSWER_SECONDS,
        parent_pipe: int | None = None,
        zygote: ZygoteProcess | None = None,
        on_zygote: Callable[[ZygoteProcess], None] = _nothing,
    ) -> None:
        """`preload`: the modules that the zygote imports ahead, where they are installed.

        `settings`: None = workers run as this process' own user. `groups`: None = this process may make no cgroups.
        `parent_pipe`: all end when this pipe breaks; None = with this process. `zygote`: of the server before, with the
        workers that it has kept. `on_zygote`: told of each that is started.

        Raises:
            ValueError: the user that the settings name cannot be had.
        """
        self._log = log
        self.settings = settings or WorkerSettings(user=KEEP_USER)
        self._candidates = candidates(self.settings)
        self._groups = groups
        self._watch = ResourceWatch()
        self._told_of_user: set[str] = set()
        """The models whose workers do not run as the user that is meant for them."""
        self._parent_pipe_writer: int | None = None
        if parent_pipe is None:
            parent_pipe, self._parent_pipe_writer = os.pipe2(os.O_CLOEXEC)
            # Workers open it anew, other users' as well (core/exit_with_parent.py).
            os.fchmod(parent_pipe, 0o444)
        self._parent_pipe = parent_pipe
        self._link = ZygoteLink(
            preload,
            log,
            worker_environment(os.environ, self.settings),
            answer_seconds,
            parent_pipe,
            zygote,
            on_zygote,
            self._on_message,
            self._zygote_gone,
        )
        self._kept = KeptWorkers()
        self._spawn_ids = itertools.count(1)
        self._launches: dict[int, _Launch] = {}
        self._workers: dict[int, WorkerProcess] = {}
        self._shared: dict[str, WorkerProcess] = {}
        """The last of each group of models that share one."""
        self._starting: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def groups_folder(self) -> str:
        """Where the cgroups of workers are; "" = it makes none."""
        return str(self._groups.folder) if self._groups is not None else ""

    def start(self) -> None:
        """Start the zygote, unless there is one. It imports the modules on its own; a launch meanwhile waits for it."""
        if self._link.has_zygote:
            self._link.tell(ListKept())
            return
        self._kept.are_known.set()
        self._link.start()

    async def launch(self, options: LaunchOptions, instances: Sequence[Instance], log: logging.Logger) -> WorkerSession:
        """A session with these instances in a process of its own, which is started, or in that of its group; what that
        writes goes to `log`.

        Raises:
            ServeError: INTERNAL, it cannot be started.
            OSError: no descriptor, or no cgroup, can be had for it.
        """
        name = options.shared_worker
        if not name:
            return _session(await self._start(options, log), instances)
        async with self._starting[name]:
            process = self._shared.get(name)
            if process is None or not process.takes_sessions:
                process = self._shared[name] = await self._start(options, log)
            return _session(process, instances)

    async def _start(self, options: LaunchOptions, log: logging.Logger) -> WorkerProcess:
        """A process without a session. Raises: as `launch`."""
        reception, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        output_reader, output_writer = os.pipe2(os.O_CLOEXEC)
        # A model, or what it starts, may open /dev/stderr.
        os.fchmod(output_writer, 0o622)
        settings = self._bounded(options)
        answer: asyncio.Future[WorkerProcess] | None = None
        group: ControlGroup | None = None
        try:
            if self._groups is not None and (settings.memory_bytes or settings.tasks):
                group = self._groups.create(settings.memory_bytes, settings.tasks)
            start = functools.partial(self._add, reception, output_reader, options, log, group)
            descriptors = [output_writer, peer.fileno(), reception.fileno(), output_reader]
            for _ in range(_LAUNCH_ATTEMPTS):
                answer = asyncio.get_running_loop().create_future()
                launch = _Launch(options.model_name, settings, group, start, answer)
                process = await self._spawn(options, descriptors, launch)
                if process is not None:
                    return process
            raise internal("the zygote, which starts workers, ends again and again; see the server's log")
        except BaseException:
            if answer is not None and answer.done() and not answer.cancelled() and answer.exception() is None:
                answer.result().kill()
            else:
                reception.close()
                os.close(output_reader)
                if group is not None:
                    self._watch.add_grouped(group, None)
            raise
        finally:
            os.close(output_writer)
            peer.close()

    async def has_kept(self, key: str) -> bool:
        """Whether a worker of the server before has loaded what has this key."""
        if not self._kept.are_known.is_set():
            self._link.attach()
            try:
                await asyncio.wait_for(self._kept.are_known.wait(), self._link.answer_seconds)
            except TimeoutError:
                self._link.give_up()
        return self._kept.has(key)

    async def take_over(
        self, key: str, options: LaunchOptions, instances: Sequence[Instance], log: logging.Logger
    ) -> WorkerSession:
        """A session with the worker that `has_kept` has told of."""
        kept = self._kept.take(key)
        settings, folder = self._bounded(options), kept.control_group
        group = ControlGroup(Path(folder), settings.memory_bytes, settings.tasks) if folder else None
        process = self._add(kept.reception, kept.output, options, log, group, kept.pid, kept.pidfd)
        return _session(process, instances)

    def _bounded(self, options: LaunchOptions) -> WorkerSettings:
        """The settings with the model's own bounds."""
        bounds: Mapping[str, Any] = options.bounds
        return replace(self.settings, **bounds)

    def _add(
        self,
        reception: socket.socket,
        output: int,
        options: LaunchOptions,
        log: logging.Logger,
        group: ControlGroup | None,
        pid: int,
        pidfd: int | None,
    ) -> WorkerProcess:
        """A worker that runs, kept within its bounds from now on. `group`: its cgroup, where the kernel keeps these."""
        printed = WorkerOutput(output, options.output_prefix, log)
        worker = self._workers[pid] = WorkerProcess(pid, pidfd, reception, printed, group, options.shared_worker)
        if group is not None:
            self._watch.add_grouped(group, worker)
        else:
            settings = self._bounded(options)
            self._watch.add(worker, settings.memory_bytes, settings.tasks)
        return worker

    def keep(self, worker: WorkerProcess, key: str) -> None:
        """Have a worker that serves held for the server that may come after this one."""
        # What the zygote does not hear of is loaded anew then.
        self._link.tell(Keep(worker.pid, key))

    def end_kept(self) -> None:
        """What has not been claimed by now is wanted no more: its model is gone, or another."""
        groups = self._kept.control_groups
        self._kept.end()
        for folder in groups:
            self._watch.add_grouped(ControlGroup(Path(folder), 0, 0), None)

    def set_verbose(self, verbose: bool) -> None:
        """Have all workers write details to the log, or none, from now on."""
        for worker in self._workers.values():
            for session in worker.sessions:
                session.set_verbose(verbose)

    async def close(self) -> None:
        """End the zygote; the workers are to have been stopped."""
        await self._watch.close()
        self._link.end()
        if self._parent_pipe_writer is not None:
            os.close(self._parent_pipe_writer)
            os.close(self._parent_pipe)

    async def _spawn(self, options: LaunchOptions, descriptors: Sequence[int], launch: _Launch) -> WorkerProcess | None:
        """One attempt; None when the zygote ended meanwhile."""
        spawn_id = next(self._spawn_ids)
        named = worker_environment(os.environ, self.settings, options.model_name)
        message = Spawn(
            spawn_id,
            replace(options, environment={**named, **options.environment}),
            Confinement(
                self._candidates,
                launch.settings.core_dumps,
                launch.settings.file_bytes,
                str(launch.group.folder) if launch.group is not None else "",
            ),
        )
        self._launches[spawn_id] = launch
        try:
            return await self._link.ask(message, descriptors, launch.worker)
        except ConnectionResetError:
            return None
        finally:
            del self._launches[spawn_id]

    def _on_message(self, message: Any, descriptors: Sequence[int]) -> None:
        match message:
            case Spawned(spawn_id, pid, user_problem):
                self._spawned(spawn_id, pid, descriptors[0] if descriptors else None, user_problem)
            case SpawnFailed(spawn_id, reason):
                launch = self._launches.get(spawn_id)
                if launch is not None and not launch.worker.done():
                    launch.worker.set_exception(internal(reason))
            case Exited(pid, wait_status):
                worker = self._workers.pop(pid, None)
                if worker is not None:
                    worker.has_exited(wait_status)
                self._kept.exited(pid)
            case Kept() as kept:
                self._kept.add(kept, descriptors)
            case KeptListed():
                self._list_ended()

    def _list_ended(self) -> None:
        """All are known that the server before had; cgroups of others are of workers that have ended since."""
        if self._groups is not None:
            known = self._kept.control_groups
            for group in self._groups.left():
                if str(group.folder) not in known:
                    self._watch.add_grouped(group, None)
        self._kept.are_known.set()

    def _spawned(self, spawn_id: int, pid: int, pidfd: int | None, user_problem: str) -> None:
        launch = self._launches.get(spawn_id)
        if launch is not None and not launch.worker.done():
            # At once: the next message may already be that it has exited.
            launch.worker.set_result(launch.start(pid, pidfd))
            if user_problem:
                self._warn_of_user(launch.model_name, user_problem)
            return
        # Nobody waits any more.
        kill(pid, pidfd)
        if pidfd is not None:
            os.close(pidfd)

    def _warn_of_user(self, model_name: str, problem: str) -> None:
        """Once with what to do, and then a line for each further model. `problem`: "root: user 'nobody' cannot ..."."""
        if model_name in self._told_of_user:
            return
        text = f"the workers of model '{model_name}' run as {problem}"
        if self._told_of_user:
            self._log.info("%s", text)
        else:
            self._log.warning(
                "%s. Make it open to that user (chmod), name another user with --worker-user, or keep root without this"
                " warning by --worker-user=root; each further model is told of as information",
                text,
            )
        self._told_of_user.add(model_name)

    def _zygote_gone(self) -> None:
        # They have noticed, and end.
        self.end_kept()
        self._kept.are_known.set()
        for launch in self._launches.values():
            if not launch.worker.done():
                launch.worker.set_exception(ConnectionResetError("the zygote has ended"))
        workers, self._workers = self._workers, {}
        for worker in workers.values():
            worker.zygote_gone()


def _session(process: WorkerProcess, instances: Sequence[Instance]) -> WorkerSession:
    """Raises: as WorkerSession; nothing is left then."""
    try:
        return WorkerSession(process, instances)
    except BaseException:
        if not process.sessions:
            process.kill()
        raise
