"""Runs the zygote's loop: takes requests for workers, starts the workers and reports their ends."""

from __future__ import annotations

import os
import resource
import select
import shutil
import signal
import socket
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy.random  # Not numpy alone, which would import this part in each worker anew.

from rocserve.core.passed_descriptors import send_with_descriptors
from rocserve.workers import main as worker
from rocserve.workers import messages
from rocserve.workers.isolation import Identity, choose, confine

_LONGEST_MESSAGE = 1024 * 1024


@dataclass(slots=True)
class _Held:
    """The server's ends of a worker's output pipe and reception, kept for the next server."""

    output: int
    reception: socket.socket
    control_group: str
    key: str = ""
    """The key of the Keep message; "" = none has come, so the next server does not get the worker."""
    is_left: bool = False
    """The worker is left from the previous server."""

    def close(self) -> None:
        os.close(self.output)
        self.reception.close()


class Spawner:
    """Serves one server after the other on one connection. On one thread."""

    def __init__(self, connection: socket.socket, parent_pipe: int, kept: int) -> None:
        self._connection = connection
        self._parent_pipe = parent_pipe
        self._kept = kept
        self._held: dict[int, _Held] = {}
        # The zygote needs two descriptors for each worker. Workers get the original limit.
        self._open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (self._open_files[1], self._open_files[1]))
        self._single_threaded = len(list(Path("/proc/self/task").iterdir())) == 1
        if not self._single_threaded:
            print("the zygote has several threads after its imports; workers are started by exec", file=sys.stderr)
        self._child_ended, self._child_ended_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._child_ended_writer, warn_on_full_buffer=False)

    def run(self) -> None:
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        poll.register(self._child_ended, select.POLLIN)
        try:
            while True:
                ready = {descriptor for descriptor, _ in poll.poll()}
                if self._child_ended in ready:
                    os.read(self._child_ended, 4096)
                    self._reap()
                if self._connection.fileno() in ready and not self._serve():
                    return
        except ConnectionError:
            return

    def _serve(self) -> bool:
        """Returns False if the connection is closed."""
        data = self._connection.recv(_LONGEST_MESSAGE)
        if not data:
            return False
        match messages.decode_message(data):
            case messages.Spawn() as spawn:
                for pid, held in self._held.items():
                    if held.is_left and held.key == spawn.key:
                        self._send_worker(pid, held)
                        held.is_left = False
                        break
                else:
                    self._start(spawn)
            case messages.Keep(pid, key):
                if kept := self._held.get(pid):
                    kept.key = key
            case messages.NewServer() as arrival:
                for pid, held in self._held.items():
                    held.is_left = bool(held.key)
                    if not held.is_left:
                        _end_group(pid)
                self._send(arrival)
            case messages.EndLeft():
                for pid, held in self._held.items():
                    if held.is_left:
                        held.is_left = False
                        _end_group(pid)
            case message:
                raise ValueError(f"a {type(message).__name__} is nothing for the zygote")
        return True

    def _start(self, spawn: messages.Spawn) -> None:
        options, held = spawn.options, None
        with ExitStack() as workers_ends:
            try:
                # The paths that the worker's Python reads: its interpreter, its loader, and the import path.
                program = [shutil.which(options.interpreter or sys.executable) or "", str(Path(__file__).parent)]
                for word in options.loader:
                    program += word.split(":")
                if not options.interpreter:
                    program += sys.path
                program = [file for file in program if file.startswith("/")]
                identity, problem = choose(spawn.confinement, options.readable, options.writable, program)
                servers_end, reception = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                workers_ends.enter_context(reception)
                output, writer = os.pipe2(os.O_CLOEXEC)
                workers_ends.callback(os.close, writer)
                # A model, or a process that it starts, may open /dev/stderr.
                os.fchmod(writer, 0o622)
                held = _Held(output, servers_end, spawn.confinement.control_group)
                pid = self._spawn(spawn, identity, writer, reception.fileno(), held)
            except OSError as error:
                if held is not None:
                    held.close()
                self._send(messages.SpawnFailed(str(error)))
                return
        self._held[pid] = held
        self._send_worker(pid, held, problem)

    def _spawn(self, spawn: messages.Spawn, identity: Identity | None, output: int, reception: int, held: _Held) -> int:
        options = spawn.options
        forked = options.forked and self._single_threaded
        if not forked:
            if shutil.which(options.interpreter or sys.executable) is None:
                raise FileNotFoundError(f"there is no Python interpreter '{options.interpreter}'")
            if options.loader and shutil.which(options.loader[0]) is None:
                raise FileNotFoundError(f"there is no '{options.loader[0]}', which is to start the worker's Python")
        pid = os.fork()
        if pid:
            return pid
        status = 70
        try:
            self._leave(held)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            os.environ.update(options.environment)
            confine(identity, spawn.confinement)
            if not forked:
                self._execute(options, reception)
            # Otherwise all workers would draw the same numbers. Python's random module reseeds itself after a fork.
            numpy.random.seed()
            status = worker.main((options.title, str(self._parent_pipe), str(reception)))
        except BaseException as error:
            os.write(2, f"the worker could not be started: {error!r}\n".encode())
        finally:
            for stream in (sys.stdout, sys.stderr):
                # A model may have closed or replaced the streams.
                with suppress(Exception):
                    stream.flush()
            # Not sys.exit, which would run the exit handlers of the zygote's modules.
            os._exit(status)

    def _leave(self, held: _Held) -> None:
        """Close all of the zygote's descriptors in a new child, and lead a new process group, with which processes that
        a model starts will end."""
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(self._child_ended)
        os.close(self._child_ended_writer)
        os.close(self._kept)
        self._connection.close()
        for each in (held, *self._held.values()):
            each.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, self._open_files)

    def _execute(self, options: messages.LaunchOptions, reception: int) -> None:
        handed = [self._parent_pipe, reception]
        for descriptor in handed:
            os.set_inheritable(descriptor, True)
        bootstrap = Path(__file__).with_name("bootstrap.py")
        # A program loader does not search PATH for the program that it starts.
        interpreter = options.interpreter or sys.executable
        python = [*options.loader, shutil.which(interpreter) or interpreter] if options.loader else [interpreter]
        command = [*python, str(bootstrap), worker.__name__, options.title, *map(str, handed)]
        os.execvp(command[0], command)

    def _reap(self) -> None:
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            # Until the worker is reaped, its number cannot belong to another group.
            _end_group(ended.si_pid)
            if held := self._held.pop(ended.si_pid, None):
                held.close()
            self._send(messages.Exited(*os.waitpid(ended.si_pid, 0)))

    def _send_worker(self, pid: int, held: _Held, problem: str = "") -> None:
        """Send Spawned. Only the zygote reaps the worker, so its number is valid for the pidfd, which comes last."""
        descriptors = [held.reception.fileno(), held.output]
        with suppress(OSError):
            descriptors.append(os.pidfd_open(pid))
        message = messages.Spawned(pid, held.is_left, problem, held.control_group)
        try:
            send_with_descriptors(self._connection, messages.encode_message(message), descriptors)
        finally:
            for pidfd in descriptors[2:]:
                os.close(pidfd)

    def _send(self, message: messages.Message) -> None:
        self._connection.send(messages.encode_message(message))


def _end_group(leader: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
