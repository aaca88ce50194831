"""Starts workers through the zygote, and starts another zygote when it ends or does not answer."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rocserve.backends.migraphx.installation import QUIET
from rocserve.core import bootstrap
from rocserve.core.errors import internal
from rocserve.core.passed_descriptors import receive_with_descriptors
from rocserve.observability.log_fields import about
from rocserve.settings import KEEP_USER, WorkerSettings
from rocserve.workers import messages
from rocserve.workers.control_groups import ControlGroup, ControlGroups
from rocserve.workers.instance import Instance
from rocserve.workers.isolation import Confinement, candidates, worker_environment
from rocserve.workers.process import WorkerProcess, WorkerSession, exit_text, kill
from rocserve.workers.recent_lines import RecentLines
from rocserve.workers.resource_watch import ResourceWatch
from rocserve.workers.worker_output import WorkerOutput

_MESSAGE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class ZygoteProcess:
    """A running zygote, and the connection to it."""

    process: subprocess.Popen[bytes]
    connection: socket.socket

    @classmethod
    def start(cls, preload: Sequence[str], parent_pipe: int, environment: Mapping[str, str]) -> ZygoteProcess:
        """Start a zygote, which imports those of the modules that are installed, and ends when the pipe breaks. Without
        modules it imports nothing before the first launch."""
        connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Launches queue here while the zygote imports.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1024 * 1024)
        with other:
            descriptors = (other.fileno(), parent_pipe)
            process = subprocess.Popen(
                [sys.executable, bootstrap.__file__, "rocserve.workers.zygote", *map(str, descriptors), *preload],
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                # ONNX Runtime's official builds report usage over the network, on a thread that a zygote must not have.
                env={"ORT_DISABLE_TELEMETRY": "1", **QUIET, **environment},
            )
        return cls(process, connection)

    def end(self) -> str:
        """Returns how it ended."""
        with self.connection:
            self.process.kill()
            return exit_text(self.process.wait())


@dataclass(frozen=True, slots=True)
class _Launch:
    """A Spawn message that the zygote has not answered."""

    answer: asyncio.Future[WorkerProcess]
    options: messages.LaunchOptions
    control_group: ControlGroup | None
    log: logging.Logger


_ANSWER_SECONDS = 60.0
"""How long the zygote may be silent during a launch. A worker takes milliseconds, its imports seconds, or many seconds
on a busy machine."""


@dataclass(eq=False, repr=False)
class WorkerLauncher:
    """Keeps a zygote and starts workers through it. If the zygote dies, workers go on, and the next launch starts
    another; a zygote that does not answer is killed. All of them end with this process, which alone holds the writing
    end of their pipe. `start` needs no asyncio loop, and must be called before grpc is imported, so that the zygote has
    the machine to itself; everything else runs on the loop."""

    preload: Sequence[str]
    """Modules that the zygote imports at its start, if they are installed; others when a launch needs them."""
    log: logging.Logger
    settings: WorkerSettings = field(default_factory=lambda: WorkerSettings(user=KEEP_USER))
    groups: ControlGroups | None = None
    """None = this process may make no cgroups."""
    answer_seconds: float = _ANSWER_SECONDS
    recent_lines: RecentLines = field(default_factory=RecentLines, init=False)
    zygote: ZygoteProcess | None = field(default=None, init=False)
    """None = the next launch starts one."""

    def __post_init__(self) -> None:
        """Raises ValueError if workers cannot run as the user in the settings."""
        self._candidates = candidates(self.settings)
        self._watch = ResourceWatch()
        self._models_as_other_user: set[str] = set()
        """Models whose workers do not run as the preferred user."""
        self._pipe, self._pipe_writer = os.pipe2(os.O_CLOEXEC)
        # Workers, including those of other users, open the pipe a second time (core/exit_with_parent.py).
        os.fchmod(self._pipe, 0o444)
        self._started_at = self._last_message_at = time.monotonic()
        """When the zygote last sent something; less than `_started_at` if it has sent nothing yet."""
        self._attached = False
        self._imported: set[str] = set()
        """What the zygote has imported for launches that it has answered."""
        self._not_preloaded: set[str] = set()
        """Modules whose import seems to have ended a zygote."""
        self._launches: deque[_Launch] = deque()
        self._workers: dict[int, WorkerProcess] = {}
        self._shared: dict[str, WorkerProcess] = {}
        """The latest process of each group of models that share a process, by the group's name."""
        self._starting: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def start(self) -> None:
        """Start the zygote. A launch waits for the zygote's imports."""
        self._start_zygote()

    async def launch(
        self, options: messages.LaunchOptions, instances: Sequence[Instance], log: logging.Logger
    ) -> WorkerSession:
        """Open a session with these instances in a new process, or in that of the group with which the model shares
        one. The output goes to `log`. Raises ServeError (INTERNAL) if the process cannot be started, OSError if no
        descriptor or no cgroup is free."""
        name = options.shared_worker
        self.recent_lines.share(options.model_name, name or options.model_name)
        async with self._starting[name] if name else nullcontext():
            process = self._shared.get(name)
            if process is None or not process.takes_sessions:
                process = await self._start(options, log)
                if name:
                    self._shared[name] = process
            try:
                return await WorkerSession.open(process, instances)
            except BaseException:
                if not process.sessions:
                    process.kill()
                raise

    async def _start(self, options: messages.LaunchOptions, log: logging.Logger) -> WorkerProcess:
        """Start a process without a session. Raises as `launch`."""
        settings, group = self._bounded_settings(options), None
        if self.groups is not None and (settings.memory_bytes or settings.tasks):
            group = self.groups.create(settings.memory_bytes, settings.tasks)
        folder = "" if group is None else str(group.folder)
        named = worker_environment(os.environ, self.settings, options.model_name)
        options = replace(options, environment={**named, **options.environment})
        confinement = Confinement(self._candidates, settings.core_dumps, settings.file_bytes, folder)
        worker: WorkerProcess | None = None
        try:
            for _ in range(3):
                preload = tuple(name for name in options.preload if name not in self._not_preloaded)
                spawn = messages.Spawn(replace(options, preload=preload), confinement)
                with suppress(ConnectionResetError):
                    worker = await self._ask(spawn, group, log)
                    return worker
            raise internal("the zygote, which starts workers, keeps ending; see the server's log")
        finally:
            if group is not None and worker is None:
                self._watch.add_grouped(group, None)

    def _bounded_settings(self, options: messages.LaunchOptions) -> WorkerSettings:
        bounds: Mapping[str, Any] = options.bounds
        return replace(self.settings, **bounds)

    def _add(self, spawned: messages.Spawned, descriptors: Sequence[int], launch: _Launch) -> WorkerProcess:
        """Register a running worker, which is watched for its bounds from now on."""
        reception, output, *pidfds = descriptors
        options, group = launch.options, launch.control_group
        worker = self._workers[spawned.pid] = WorkerProcess(
            spawned.pid,
            pidfds[0] if pidfds else None,
            socket.socket(fileno=reception),
            WorkerOutput(
                output,
                options.output_prefix,
                launch.log,
                {**options.log_fields, "worker": spawned.pid},
                partial(self.recent_lines.add, options.shared_worker or options.model_name),
            ),
            group,
            options.shared_worker,
        )
        if group is not None:
            self._watch.add_grouped(group, worker)
        else:
            settings = self._bounded_settings(options)
            self._watch.add(worker, settings.memory_bytes, settings.tasks)
        if spawned.user_problem and options.model_name not in self._models_as_other_user:
            # The text is "root: user 'nobody' cannot ...". Only the first model gets a warning with advice.
            text = f"the workers of model '{options.model_name}' run as {spawned.user_problem}"
            if self._models_as_other_user:
                self.log.debug("%s", text, extra=about(model=options.model_name))
            else:
                self.log.warning(
                    "%s. Let that user read it (chmod), name another user with --worker-user, or keep root without this"
                    " warning by --worker-user=root; --log-verbose=1 names further models",
                    text,
                    extra=about(model=options.model_name),
                )
            self._models_as_other_user.add(options.model_name)
        return worker

    def set_verbose(self, verbose: bool) -> None:
        for worker in self._workers.values():
            for session in worker.sessions:
                session.send(messages.Verbosity(verbose))

    async def close(self) -> None:
        """End the zygote. All workers must have been stopped."""
        await self._watch.close()
        self._end_zygote()
        os.close(self._pipe_writer)
        os.close(self._pipe)

    # The zygote

    def _start_zygote(self) -> ZygoteProcess:
        self._started_at, self._last_message_at = time.monotonic(), 0.0
        self._imported = set()
        environment = worker_environment(os.environ, self.settings)
        self.zygote = ZygoteProcess.start(self.preload, self._pipe, environment)
        return self.zygote

    async def _ask(self, spawn: messages.Spawn, group: ControlGroup | None, log: logging.Logger) -> WorkerProcess:
        """Return the worker that the zygote starts; if cancelled, end it. Raises ConnectionResetError if the zygote has
        ended, ServeError (INTERNAL) if it cannot start the worker, OSError if no descriptors are free."""
        answer: asyncio.Future[WorkerProcess] = asyncio.get_running_loop().create_future()
        try:
            await self._send(messages.encode_message(spawn))
            self._launches.append(_Launch(answer, spawn.options, group, log))
            asked_at = time.monotonic()
            while not answer.done():
                left = max(asked_at, self._last_message_at) + self.answer_seconds - time.monotonic()
                if left > 0:
                    await asyncio.wait((answer,), timeout=left)
                else:
                    self._kill_silent_zygote()
            return answer.result()
        except asyncio.CancelledError:
            if not answer.cancel() and answer.exception() is None:
                answer.result().kill()
            raise

    async def _send(self, message: bytes) -> None:
        asked_at = time.monotonic()
        while True:
            connection = (self.zygote or self._start_zygote()).connection
            if not self._attached:
                self._attached = True
                asyncio.get_running_loop().add_reader(connection, self._on_readable, connection)
            try:
                # A zygote that reads nothing must not block the loop.
                connection.send(message, socket.MSG_DONTWAIT)
                return
            except BlockingIOError:
                if time.monotonic() - max(asked_at, self._last_message_at) > self.answer_seconds:
                    self._kill_silent_zygote()
                else:
                    # Seconds. The zygote reads no further messages.
                    await asyncio.sleep(0.05)
            except ConnectionError:
                self._zygote_ended()

    def _kill_silent_zygote(self) -> None:
        self.log.error(
            "the zygote, which starts workers, has not answered for %g s; it is killed and restarted",
            self.answer_seconds,
        )
        if self._last_message_at < self._started_at or self._is_importing:
            self._drop_preload()
        self._zygote_ended()

    def _end_zygote(self) -> str:
        """Returns how it ended."""
        zygote, self.zygote = self.zygote, None
        if zygote is None:
            return ""
        if self._attached:
            asyncio.get_running_loop().remove_reader(zygote.connection)
        self._attached = False
        return zygote.end()

    def _on_readable(self, connection: socket.socket) -> None:
        try:
            # Three descriptors come with Spawned.
            data, descriptors = receive_with_descriptors(connection, _MESSAGE_BYTES, 3)
        except ConnectionError:
            data, descriptors = b"", []
        if not data:
            self._zygote_ended()
            return
        self._last_message_at = time.monotonic()
        match messages.decode_message(data):
            case messages.Exited(pid, wait_status):
                if (worker := self._workers.pop(pid, None)) is not None:
                    worker.has_exited(wait_status)
            case messages.Spawned() | messages.SpawnFailed() as reply:
                self._take_reply(reply, descriptors)

    def _take_reply(self, reply: messages.Spawned | messages.SpawnFailed, descriptors: Sequence[int]) -> None:
        launch = self._launches.popleft()
        self._imported.update(launch.options.preload)
        answer = launch.answer
        if not answer.done():
            if isinstance(reply, messages.SpawnFailed):
                answer.set_exception(internal(reply.reason))
                return
            if len(descriptors) > 1:
                # Added immediately, because the next message may report the worker's exit.
                answer.set_result(self._add(reply, descriptors, launch))
                return
            answer.set_exception(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
        if isinstance(reply, messages.Spawned):
            kill(reply.pid, descriptors[2] if len(descriptors) > 2 else None)
        for descriptor in descriptors:
            os.close(descriptor)

    @property
    def _is_importing(self) -> bool:
        """Whether the launch that the zygote answers next needs modules that it may not have imported."""
        return bool(self._launches) and not self._imported.issuperset(self._launches[0].options.preload)

    def _drop_preload(self) -> None:
        names = {*self.preload, *(self._launches[0].options.preload if self._launches else ())}
        names -= self._imported
        if names:
            self.log.error("the next zygote will not preload %s", ", ".join(sorted(names)))
            self.preload = ()
            self._not_preloaded |= names

    def _zygote_ended(self) -> None:
        if self.zygote is None:
            return
        end = self._end_zygote()
        self.log.error("the zygote, which starts workers, has ended (%s); workers go on", end)
        # If it lived for less than five seconds, an import has probably ended it.
        if time.monotonic() - self._started_at < 5.0 or self._is_importing:
            self._drop_preload()
        launches, self._launches = self._launches, deque()
        for launch in launches:
            if not launch.answer.done():
                launch.answer.set_exception(ConnectionResetError("the zygote has ended"))
        workers, self._workers = self._workers, {}
        for worker in workers.values():
            worker.zygote_gone()
