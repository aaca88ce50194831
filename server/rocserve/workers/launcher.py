"""Starts workers through the zygote, and starts another zygote when it ends or does not answer."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import InitVar, dataclass, field, replace
from pathlib import Path
from typing import Any

from rocserve.backends.migraphx.installation import QUIET
from rocserve.core.errors import internal
from rocserve.core.passed_descriptors import receive_with_descriptors
from rocserve.settings import KEEP_USER, WorkerSettings
from rocserve.workers import messages
from rocserve.workers.control_groups import ControlGroup, ControlGroups
from rocserve.workers.instance import Instance
from rocserve.workers.isolation import Confinement, candidates, worker_environment
from rocserve.workers.process import WorkerProcess, WorkerSession, kill
from rocserve.workers.resource_watch import ResourceWatch
from rocserve.workers.worker_output import WorkerOutput

_MESSAGE_BYTES = 64 * 1024
_MOST_DESCRIPTORS = 3
"""Descriptors that come with Spawned."""
_SEND_BUFFER_BYTES = 1024 * 1024
"""Launches queue here while the zygote imports."""
_HEALTHY_SECONDS = 5.0
_FULL_SECONDS = 0.05
"""Time between two attempts to send to a zygote that reads no further messages."""


@dataclass(frozen=True, slots=True)
class ZygoteProcess:
    """A zygote that this server has started or taken over."""

    pid: int
    connection: socket.socket
    process: subprocess.Popen[bytes] | None = None
    """None = another server has started it."""

    @classmethod
    def start(cls, preload: Sequence[str], parent_pipe: int, environment: Mapping[str, str]) -> ZygoteProcess:
        """Start a zygote, which imports those of the modules that are installed, and ends when the pipe breaks."""
        connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        with other:
            descriptors = (other.fileno(), parent_pipe)
            bootstrap = Path(__file__).with_name("bootstrap.py")
            process = subprocess.Popen(
                [sys.executable, str(bootstrap), "rocserve.workers.zygote", *map(str, descriptors), *preload],
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                # ONNX Runtime's official builds report usage over the network, on a thread that a zygote must not have.
                env={"ORT_DISABLE_TELEMETRY": "1", **QUIET, **environment},
            )
        return cls(process.pid, connection, process)

    def end(self) -> str:
        """Returns how it ended."""
        with self.connection:
            if self.process is not None:
                self.process.kill()
                return f"exit status {self.process.wait()}"
            poll = select.poll()
            poll.register(self.connection, 0)
            if not poll.poll(0):
                # The number still belongs to the zygote, because its end of the connection is open.
                os.kill(self.pid, signal.SIGKILL)
        return "its exit status is not known"


_LAUNCH_ATTEMPTS = 3
_ANSWER_SECONDS = 60.0
"""How long the zygote may be silent during a launch. A worker takes milliseconds, its imports seconds, or many seconds
on a busy machine."""


@dataclass(eq=False, repr=False)
class WorkerLauncher:
    """Keeps a zygote and starts workers through it. If the zygote dies, workers go on, and the next launch starts
    another; a zygote that does not answer is killed. Zygote and workers outlive the server if another process holds
    their pipe and the zygote's connection. `start` needs no asyncio loop, and must be called before grpc is imported,
    so that the zygote has the machine to itself; everything else runs on the loop."""

    preload: Sequence[str]
    """Modules that the zygote imports if they are installed."""
    log: logging.Logger
    settings: WorkerSettings = field(default_factory=lambda: WorkerSettings(user=KEEP_USER))
    groups: ControlGroups | None = None
    """None = this process may make no cgroups."""
    answer_seconds: float = _ANSWER_SECONDS
    parent_pipe: InitVar[int | None] = None
    """Zygote and workers end when it breaks; None = a new pipe."""
    zygote: ZygoteProcess | None = None
    """The running zygote, at first the previous server's; None = the next launch starts one."""
    on_zygote: Callable[[ZygoteProcess], None] = lambda zygote: None
    """Called with each zygote that is started."""

    def __post_init__(self, parent_pipe: int | None) -> None:
        """Raises ValueError if workers cannot run as the user in the settings."""
        self._candidates = candidates(self.settings)
        self._watch = ResourceWatch()
        self._models_as_other_user: set[str] = set()
        """Models whose workers do not run as the preferred user."""
        self._parent_pipe_writer: int | None = None
        if parent_pipe is None:
            parent_pipe, self._parent_pipe_writer = os.pipe2(os.O_CLOEXEC)
            # Workers, also those of other users, open the pipe a second time (core/exit_with_parent.py).
            os.fchmod(parent_pipe, 0o444)
        self._parent_pipe = parent_pipe
        self._started_at = self._last_message_at = time.monotonic()
        """When the zygote last sent something; less than `_started_at` if it has sent nothing yet."""
        self._attached = False
        self._launches: deque[tuple[asyncio.Future[WorkerProcess], messages.LaunchOptions, logging.Logger]] = deque()
        self._takes_replies = self.zygote is None
        """Whether replies are for this server. Until the zygote returns NewServer, they are for the previous server."""
        self._may_have_left_workers = self.zygote is not None
        self._workers: dict[int, WorkerProcess] = {}
        self._shared: dict[str, WorkerProcess] = {}
        """The latest process of each group of models that share a process, by the group's name."""
        self._starting: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def groups_folder(self) -> str:
        """The folder of workers' cgroups; "" = this server makes none."""
        return str(self.groups.folder) if self.groups is not None else ""

    def start(self) -> None:
        """Start the zygote, or greet the previous server's. A launch waits for the zygote's imports."""
        if self.zygote is not None:
            self._post(messages.NewServer())
        else:
            self._start_zygote()

    async def launch(
        self, options: messages.LaunchOptions, instances: Sequence[Instance], log: logging.Logger, key: str
    ) -> WorkerSession:
        """Open a session with these instances, in the process that was left under the key or in a new one. Models that
        share a process get that of their group, whose key is the group's name. The output goes to `log`.
        Raises ServeError (INTERNAL) if the process cannot be started, OSError if no descriptor or no cgroup is free."""
        name = options.shared_worker
        async with self._starting[name] if name else nullcontext():
            process = self._shared.get(name)
            if process is None or not process.takes_sessions:
                process = await self._start(options, log, name or key)
                if name:
                    self._shared[name] = process
            try:
                return await WorkerSession.open(process, instances, key)
            except BaseException:
                if not process.sessions:
                    process.kill()
                raise

    async def _start(self, options: messages.LaunchOptions, log: logging.Logger, key: str) -> WorkerProcess:
        """Start a process without a session, or take one over. Raises as `launch`."""
        settings, folder = self._bounded_settings(options), ""
        if self.groups is not None and (settings.memory_bytes or settings.tasks):
            folder = str(self.groups.create(settings.memory_bytes, settings.tasks).folder)
        named = worker_environment(os.environ, self.settings, options.model_name)
        spawn = messages.Spawn(
            replace(options, environment={**named, **options.environment}),
            Confinement(self._candidates, settings.core_dumps, settings.file_bytes, folder),
            key,
        )
        worker: WorkerProcess | None = None
        try:
            for _ in range(_LAUNCH_ATTEMPTS):
                with suppress(ConnectionResetError):
                    worker = await self._ask(spawn, options, log)
                    return worker
            raise internal("the zygote, which starts workers, ends again and again; see the server's log")
        finally:
            if folder and (worker is None or worker.was_left):
                self._watch.add_grouped(ControlGroup(Path(folder), 0, 0), None)

    def _bounded_settings(self, options: messages.LaunchOptions) -> WorkerSettings:
        bounds: Mapping[str, Any] = options.bounds
        return replace(self.settings, **bounds)

    def _add(
        self,
        spawned: messages.Spawned,
        descriptors: Sequence[int],
        options: messages.LaunchOptions,
        log: logging.Logger,
    ) -> WorkerProcess:
        """Register a running worker, which is watched for its bounds from now on."""
        reception, output, *pidfds = descriptors
        settings = self._bounded_settings(options)
        group: ControlGroup | None = None
        if spawned.control_group:
            group = ControlGroup(Path(spawned.control_group), settings.memory_bytes, settings.tasks)
        worker = self._workers[spawned.pid] = WorkerProcess(
            spawned.pid,
            pidfds[0] if pidfds else None,
            socket.socket(fileno=reception),
            WorkerOutput(output, options.output_prefix, log),
            group,
            options.shared_worker,
            spawned.was_left,
        )
        if group is not None:
            self._watch.add_grouped(group, worker)
        else:
            self._watch.add(worker, settings.memory_bytes, settings.tasks)
        if spawned.user_problem and options.model_name not in self._models_as_other_user:
            # The text is "root: user 'nobody' cannot ...". Only the first model gets a warning with advice.
            text = f"the workers of model '{options.model_name}' run as {spawned.user_problem}"
            if self._models_as_other_user:
                self.log.debug("%s", text)
            else:
                self.log.warning(
                    "%s. Make it open to that user (chmod), name another user with --worker-user, or keep root without"
                    " this warning by --worker-user=root; further models are named with --log-verbose=1",
                    text,
                )
            self._models_as_other_user.add(options.model_name)
        return worker

    def keep(self, worker: WorkerProcess, key: str) -> None:
        # If the message is lost, the next server loads the model again.
        self._post(messages.Keep(worker.pid, key))

    def end_left_workers(self) -> None:
        """End the previous server's workers and sessions that were not taken over, and remove its cgroups."""
        if not self._may_have_left_workers:
            return
        self._may_have_left_workers = False
        self._post(messages.EndLeft())
        for process in self._shared.values():
            with suppress(OSError):
                process.reception.send(messages.END_LEFT, socket.MSG_DONTWAIT)
        used = {worker.control_group.folder for worker in self._workers.values() if worker.control_group is not None}
        for group in self.groups.left() if self.groups is not None else ():
            if group.folder not in used:
                self._watch.add_grouped(group, None)

    def set_verbose(self, verbose: bool) -> None:
        for worker in self._workers.values():
            for session in worker.sessions:
                session.send(messages.Verbosity(verbose))

    async def close(self) -> None:
        """End the zygote. All workers must have been stopped."""
        await self._watch.close()
        self._end_zygote()
        if self._parent_pipe_writer is not None:
            os.close(self._parent_pipe_writer)
            os.close(self._parent_pipe)

    # The zygote

    def _start_zygote(self) -> ZygoteProcess:
        self._started_at, self._last_message_at = time.monotonic(), 0.0
        environment = worker_environment(os.environ, self.settings)
        self.zygote = ZygoteProcess.start(self.preload, self._parent_pipe, environment)
        self.on_zygote(self.zygote)
        return self.zygote

    def _post(self, message: Any) -> None:
        """Send a message; it is lost if there is no zygote or its queue is full."""
        if self.zygote is not None:
            with suppress(OSError):
                self.zygote.connection.send(messages.encode_message(message), socket.MSG_DONTWAIT)

    async def _ask(
        self, message: messages.Spawn, options: messages.LaunchOptions, log: logging.Logger
    ) -> WorkerProcess:
        """Return the worker that the zygote replies with; if cancelled, end it. Raises ConnectionResetError if the
        zygote has ended, ServeError (INTERNAL) if there is no worker, OSError if no descriptors are free."""
        answer: asyncio.Future[WorkerProcess] = asyncio.get_running_loop().create_future()
        try:
            await self._send(messages.encode_message(message))
            self._launches.append((answer, options, log))
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
                    await asyncio.sleep(_FULL_SECONDS)
            except ConnectionError:
                self._zygote_ended()

    def _kill_silent_zygote(self) -> None:
        self.log.error(
            "the zygote, which starts workers, has not answered for %g s; it is killed and restarted",
            self.answer_seconds,
        )
        if self._last_message_at < self._started_at:
            # The zygote may hang in an import.
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
            data, descriptors = receive_with_descriptors(connection, _MESSAGE_BYTES, _MOST_DESCRIPTORS)
        except ConnectionError:
            data, descriptors = b"", []
        if not data:
            self._zygote_ended()
            return
        self._last_message_at = time.monotonic()
        match messages.decode_message(data):
            case messages.NewServer():
                self._takes_replies = True
            case messages.Exited(pid, wait_status):
                if (worker := self._workers.pop(pid, None)) is not None:
                    worker.has_exited(wait_status)
            case messages.Spawned() | messages.SpawnFailed() as reply:
                self._take_reply(reply, descriptors)

    def _take_reply(self, reply: messages.Spawned | messages.SpawnFailed, descriptors: Sequence[int]) -> None:
        if self._takes_replies and not (asked := self._launches.popleft())[0].done():
            answer, options, log = asked
            if isinstance(reply, messages.SpawnFailed):
                answer.set_exception(internal(reply.reason))
                return
            if len(descriptors) > 1:
                # Added immediately, because the next message may report the worker's exit.
                answer.set_result(self._add(reply, descriptors, options, log))
                return
            answer.set_exception(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
        if isinstance(reply, messages.Spawned):
            kill(reply.pid, descriptors[2] if len(descriptors) > 2 else None)
        for descriptor in descriptors:
            os.close(descriptor)

    def _drop_preload(self) -> None:
        if self.preload:
            self.log.error("the next zygote does without importing %s ahead", ", ".join(self.preload))
            self.preload = ()

    def _zygote_ended(self) -> None:
        if self.zygote is None:
            return
        is_own = self.zygote.process is not None
        end = self._end_zygote()
        self.log.error("the zygote, which starts workers, has ended (%s); workers go on", end)
        if is_own and time.monotonic() - self._started_at < _HEALTHY_SECONDS:
            self._drop_preload()
        asked, self._launches, self._takes_replies = self._launches, deque(), True
        for answer, *_ in asked:
            if not answer.done():
                answer.set_exception(ConnectionResetError("the zygote has ended"))
        # Workers that the zygote kept from the previous server have noticed its end, and end too. Not later:
        # the cgroups of workers that were taken over are known to be in use only while these are in `_workers`.
        self.end_left_workers()
        workers, self._workers = self._workers, {}
        for worker in workers.values():
            worker.zygote_gone()
