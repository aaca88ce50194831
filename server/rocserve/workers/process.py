"""Watches worker processes in the server, and their sessions, one for each model version in a process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, replace
from typing import TypeVar

from rocserve.core.custom_metrics import MetricChanges
from rocserve.core.errors import ServeError, internal, status_code
from rocserve.core.load_check import KINDS, LoadCheckFailed, LoadCheckReport
from rocserve.core.passed_descriptors import send_with_descriptors
from rocserve.links.entries import LONGEST_TEXT
from rocserve.workers import messages
from rocserve.workers.control_groups import ControlGroup
from rocserve.workers.instance import Instance
from rocserve.workers.worker_output import WorkerOutput

_BROKEN_SECONDS = 1.0
"""A worker that has closed its socket should end within this time; otherwise it is killed."""
_STATUS_WAIT_SECONDS = 10.0
"""How long the zygote may take to report the end of a process: seconds on a busy machine, forever if it hangs."""


def exit_text(code: int) -> str:
    """Say how a process ended. `code`: its exit status; negative = the number of the signal that killed it."""
    return f"killed by signal {-code}" if code < 0 else f"exited with status {code}"


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """How a worker process ended, and the reason if it is known."""

    status: str = "no exit status"
    """"killed by signal 9", "exited with status 3"."""
    reason: str = ""
    """Why the server or the kernel ended it; "" = it ended by itself."""
    exceeds_limit: bool = False
    """The reason is a limit that the worker exceeded."""

    @property
    def text(self) -> str:
        return f"{self.reason}; {self.status}" if self.reason else self.status

    @property
    def description(self) -> str:
        return f"was killed: {self.reason}" if self.exceeds_limit else f"ended unexpectedly ({self.text})"


@dataclass(eq=False)
class WorkerProcess:
    """A process that serves one model version, or those of a group that share it. Lives on the asyncio loop."""

    pid: int
    _pidfd: int | None
    reception: socket.socket
    """The process receives its sessions' sockets through it."""
    _output: WorkerOutput
    control_group: ControlGroup | None = None
    shared_worker: str = ""
    """See LaunchOptions."""

    def __post_init__(self) -> None:
        self.sessions: list[WorkerSession] = []
        self.sessions_opening = 0
        self._loop = asyncio.get_running_loop()
        self.exited = asyncio.Event()
        self.end = ProcessEnd()
        self._status_timer: asyncio.TimerHandle | None = None
        """Set once the process has been killed."""

    @property
    def title(self) -> str:
        return f"shared worker '{self.shared_worker}'" if self.shared_worker else "worker"

    @property
    def last_words(self) -> str:
        line = self._output.last_line
        return f"; it last wrote: {line}" if line else ""

    @property
    def has_ended(self) -> bool:
        return self.exited.is_set()

    @property
    def takes_sessions(self) -> bool:
        return self._status_timer is None and not self.has_ended

    @property
    def runs(self) -> bool:
        """Whether the process runs, according to the kernel. The zygote may not have reported its end yet."""
        if self.has_ended or self._pidfd is None:
            return not self.has_ended
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return not poll.poll(0)

    def kill(self) -> None:
        if not self.takes_sessions:
            return
        kill(self.pid, self._pidfd)
        # Nothing survives SIGKILL, so if its end is not reported, the zygote hangs.
        self._status_timer = self._loop.call_later(_STATUS_WAIT_SECONDS, self.has_exited, None)

    def end_because(self, reason: str, exceeds_limit: bool = False) -> None:
        """Kill the process, because it exceeds a limit, sends invalid messages, or does not answer."""
        if self.exited.is_set():
            return
        if exceeds_limit or not self.end.exceeds_limit:
            self.end = ProcessEnd(reason=reason, exceeds_limit=exceeds_limit)
        self.kill()

    def end_broken(self, reason: str) -> None:
        """Like `end_because`, unless the process has already ended by itself; its end will be reported soon."""
        if self.runs:
            self.end_because(reason)
        else:
            self.kill()

    def zygote_gone(self) -> None:
        """Watch the process directly: without the zygote, nothing else reports its end or ends its process group."""
        if self.exited.is_set():
            return
        if self._pidfd is None:
            self.kill()
            self._exited_alone()
        else:
            self._loop.add_reader(self._pidfd, self._exited_alone)

    def _exited_alone(self) -> None:
        """End the process group, whose number is not reused as long as one of its processes is left."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        # Orphans are children of a container's first process, which may be the server.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)
        self.has_exited(None)

    def has_exited(self, wait_status: int | None) -> None:
        """`wait_status`: None = not known."""
        if self.exited.is_set():
            return
        unknown = "its exit status is not known"
        status = unknown if wait_status is None else exit_text(os.waitstatus_to_exitcode(wait_status))
        self.end = replace(self.end, status=status)
        if (group := self.control_group) is not None:
            # If the kernel ended it by a bound, the bound is the reason. Processes that it started end too.
            if not self.end.exceeds_limit and (excess := group.excess()):
                self.end = ProcessEnd(status, excess, exceeds_limit=True)
            elif not self.end.exceeds_limit and group.was_refused_tasks():
                self.end = replace(self.end, status=f"{status}; it was refused more than {group.tasks} tasks")
            group.kill()
        if self._status_timer is not None:
            self._status_timer.cancel()
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        self.reception.close()
        self._output.close()
        self.exited.set()
        for session in list(self.sessions):
            session.end()


def kill(pid: int, pidfd: int | None) -> None:
    """Kill a worker whose end the zygote has not reported yet, by its pidfd if there is one."""
    with contextlib.suppress(ProcessLookupError):
        if pidfd is not None:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)


_TURN_SECONDS = 0.005
"""Seconds of handling a worker's messages, after which the worker must wait."""

CHECK_SECONDS = 5.0
"""How long a model may take to say whether it is ready: Triton's limit."""
_ENDED = messages.ModelReadiness(False, "its worker has ended")

_Reply = TypeVar("_Reply", messages.Loaded, messages.WarmedUp)


@dataclass(eq=False, repr=False)
class WorkerSession:
    """One model version in a process, made by `open`. The process ends with its last session. Lives on the asyncio
    loop."""

    process: WorkerProcess
    instances: Sequence[Instance]
    reader: InitVar[asyncio.StreamReader]
    _writer: asyncio.StreamWriter

    def __post_init__(self, reader: asyncio.StreamReader) -> None:
        self._loop = asyncio.get_running_loop()
        self.ended = asyncio.Event()
        self._on_progress: Callable[[messages.Progress | MetricChanges], None] | None = None
        self._reply: asyncio.Future[messages.Message] | None = None
        self.checks_readiness = False
        """The model answers `check_readiness`. Known after `warm_up`."""
        self._checked: asyncio.Future[messages.ModelReadiness] | None = None
        """The check under way."""
        self.on_trace: Callable[[str], None] = lambda trace: None
        """Called with the traceback of a failed load or warm-up."""
        self._is_unloading = False
        self._kill_timer: asyncio.TimerHandle | None = None
        self._reading = self._loop.create_task(self._read(reader))
        self.process.sessions.append(self)
        if self.process.has_ended:
            self.end()

    @classmethod
    async def open(cls, process: WorkerProcess, instances: Sequence[Instance]) -> WorkerSession:
        """Pass the session's sockets to the process. Raises ServeError (INTERNAL) if the instances do not fit one
        message, OSError if no descriptor is free."""
        if len(instances) >= messages.MOST_SOCKETS:
            raise internal(f"a worker can have {messages.MOST_SOCKETS - 1} instances, not {len(instances)}")
        control, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        peers = [peer, *(instance.peer for instance in instances)]
        # If the process has ended, nobody receives them, and its control socket closes.
        with contextlib.suppress(OSError):
            files = [peer.fileno() for peer in peers]
            kind = messages.SHARED if process.shared_worker else messages.ALONE
            send_with_descriptors(process.reception, kind, files, socket.MSG_DONTWAIT)
        for one in peers:
            one.close()
        if not process.shared_worker:
            process.reception.close()
        process.sessions_opening += 1
        try:
            return cls(process, instances, *await asyncio.open_unix_connection(sock=control))
        except BaseException:
            control.close()
            raise
        finally:
            process.sessions_opening -= 1

    # Control messages

    async def load(
        self, message: messages.Load, on_progress: Callable[[messages.Progress | MetricChanges], None]
    ) -> messages.Loaded:
        """Load the model. `on_progress`: called with all reports as long as the session lives. Raises ServeError."""
        self._on_progress = on_progress
        return await self._ask(message, "loading", messages.Loaded)

    async def warm_up(self, message: messages.WarmUp) -> LoadCheckReport:
        """Warm up the model and open the instances. Returns what the warm-up and the recorded answers show. Raises
        ServeError as `load`."""
        warmed_up = await self._ask(message, "warming up", messages.WarmedUp)
        self.checks_readiness = warmed_up.checks_readiness
        for instance in self.instances:
            instance.open()
        return warmed_up.load_check

    async def check_readiness(self) -> messages.ModelReadiness:
        """Ask the model itself whether it is ready. Checks at the same time share one answer. After CHECK_SECONDS
        without an answer the model is not ready; the next call waits for the same answer."""
        if self._checked is None:
            self._checked = self._loop.create_future()
            if self._reading.done():
                self._checked.set_result(_ENDED)
            self.send(messages.CheckReadiness())
        try:
            return await asyncio.wait_for(asyncio.shield(self._checked), CHECK_SECONDS)
        except TimeoutError:
            return messages.ModelReadiness(False, f"is_ready() did not return within {CHECK_SECONDS:g} s")

    async def unload(self, grace_seconds: float) -> bool:
        """End the session after its batches; `kill` it after `grace_seconds`. Returns False if it had to be killed."""
        self._is_unloading = True
        for instance in self.instances:
            instance.stop_taking()
        self.send(messages.Unload())
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ended.wait(), grace_seconds)
        finally:
            has_ended = self.ended.is_set()
            self.kill()
        if not self.process.takes_sessions:
            await self.process.exited.wait()
        return has_ended

    async def _ask(self, message: messages.Message, doing: str, expected: type[_Reply]) -> _Reply:
        """Return the reply. Raises ServeError: INTERNAL if the worker ended without one, or the worker's reason."""
        self._reply = self._loop.create_future()
        if self._reading.done():
            self._reply.set_exception(EOFError())
        self.send(message)
        try:
            answer = await self._reply
        except EOFError:
            await self._await_status()
            raise internal(f"worker ended while {doing} ({self.process.end.text}){self.process.last_words}") from None
        finally:
            self._reply = None
        if isinstance(answer, messages.LoadFailed):
            if answer.trace:
                self.on_trace(answer.trace[:LONGEST_TEXT])
            code, text = status_code(answer.code), answer.reason[:LONGEST_TEXT]
            error = LoadCheckFailed(answer.check, text, code) if answer.check in KINDS else ServeError(code, text)
            error.trace = answer.trace[:LONGEST_TEXT]
            raise error.passing() if answer.can_pass else error.lasting()
        if not isinstance(answer, expected):
            raise internal(f"expected {expected.__name__} from the worker, got {type(answer).__name__}")
        return answer

    async def _await_status(self) -> None:
        """Wait for the exit status of the process, which arrives a moment after its control socket closes. A shared
        process may go on."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ended.wait(), _BROKEN_SECONDS)
        if not self.process.shared_worker or not self.process.runs:
            self.process.kill()
            await self.ended.wait()

    def send(self, message: messages.Message) -> None:
        """Send a message without waiting for the worker."""
        self._writer.write(messages.encode_frame(message))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        took = 0.0
        try:
            while True:
                (length,) = messages.FRAME_LENGTH.unpack(await reader.readexactly(messages.FRAME_LENGTH.size))
                if length > messages.LONGEST_FRAME:
                    raise ValueError(f"the frame announces {length} bytes, expected at most {messages.LONGEST_FRAME}")
                data = await reader.readexactly(length)
                began = time.monotonic()
                self._received(messages.decode_message(data))
                took += time.monotonic() - began
                if took > _TURN_SECONDS:
                    # A worker gets at most a tenth of the loop.
                    await asyncio.sleep(took * 9)
                    took = 0.0
        except ValueError as error:
            # Before closing the socket: the process would then end itself, and the reason would be lost.
            self.process.end_broken(f"invalid control message: {str(error)[:LONGEST_TEXT]}")
        except (EOFError, OSError):
            pass
        self._writer.close()
        self._on_progress = None
        self._take_readiness(_ENDED)
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(EOFError("the worker closed its control socket"))
        elif not self._is_unloading:
            self.instance_broken("it closed its control socket")
        elif self.process.shared_worker:
            self.end()

    def _received(self, message: messages.Message) -> None:
        """Raises ValueError if workers may not send the message."""
        if isinstance(message, messages.Progress):
            message = replace(message, text=message.text[:LONGEST_TEXT])
        if isinstance(message, messages.Progress | MetricChanges):
            if self._on_progress is not None:
                self._on_progress(message)
        elif isinstance(message, messages.ModelReadiness):
            self._take_readiness(replace(message, fault=message.fault[:LONGEST_TEXT]))
        elif not isinstance(message, messages.Loaded | messages.LoadFailed | messages.WarmedUp):
            raise ValueError(f"unexpected {type(message).__name__}, which only the server sends")
        elif self._reply is not None and not self._reply.done():
            self._reply.set_result(message)

    def _take_readiness(self, answer: messages.ModelReadiness) -> None:
        checked, self._checked = self._checked, None
        if checked is not None and not checked.done():
            checked.set_result(answer)

    def kill(self) -> None:
        """End the session immediately. A process with other sessions goes on, and unloads the model after the batch in
        flight."""
        if self.process.shared_worker:
            self.end()
        if self.process.sessions in ([], [self]) and not self.process.sessions_opening:
            self.process.kill()

    def instance_broken(self, reason: str) -> None:
        """Kill the process after a second, because an instance or the control socket is broken, unless its end is
        reported earlier."""
        if not self.ended.is_set() and not self._is_unloading and self._kill_timer is None:
            self._kill_timer = self._loop.call_later(_BROKEN_SECONDS, self.process.end_broken, reason)

    def end(self) -> None:
        """Finish after the process has ended, or when the session must end."""
        if self.ended.is_set():
            return
        self.ended.set()
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        self.process.sessions.remove(self)
        # Messages that the process has sent before its end can still be read, for a second.
        self._loop.call_later(1.0 * self.process.has_ended, self._writer.transport.abort)
