"""Runs the zygote's loop: takes requests for workers, starts the workers and reports their ends."""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy.random  # numpy alone would import this part again in each worker.

from rocserve.core import bootstrap
from rocserve.core.passed_descriptors import send_with_descriptors
from rocserve.workers import main as worker
from rocserve.workers import messages
from rocserve.workers.isolation import Identity, choose, confine
from rocserve.workers.preload import Preload


class Spawner:
    """Serves the server at the other end of the connection. On one thread."""

    def __init__(self, connection: socket.socket, parent_pipe: int, kept: int, modules: Preload) -> None:
        self._connection = connection
        self._parent_pipe = parent_pipe
        self._kept = kept
        self._modules = modules
        self._workers: set[int] = set()
        # Orphans of workers become the zygote's children, which reaps them: as a container's first process, the server
        # would inherit them, and cannot wait for processes that it does not know.
        # 36 is PR_SET_CHILD_SUBREAPER.
        ctypes.CDLL(None).prctl(36, 1)
        self._warned_of_threads = False
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
        data = self._connection.recv(1024 * 1024)
        if not data:
            return False
        match messages.decode_message(data):
            case messages.Spawn() as spawn:
                self._start(spawn)
            case message:
                raise ValueError(f"unexpected message {type(message).__name__}")
        return True

    def _start(self, spawn: messages.Spawn) -> None:
        options = spawn.options
        with ExitStack() as both_ends:
            try:
                # The paths that the worker's Python reads: its interpreter, its loader, and the import path.
                program = [
                    shutil.which(options.interpreter or sys.executable) or "",
                    str(Path(bootstrap.__file__).parent),
                ]
                for word in options.loader:
                    program += word.split(":")
                if not options.interpreter:
                    program += sys.path
                program = [file for file in program if file.startswith("/")]
                identity, problem = choose(spawn.confinement, options.readable, options.writable, program)
                receptions = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                for end in receptions:
                    both_ends.enter_context(end)
                outputs = os.pipe2(os.O_CLOEXEC)
                for descriptor in outputs:
                    both_ends.callback(os.close, descriptor)
                # A model, or a process that it starts, may open /dev/stderr.
                os.fchmod(outputs[1], 0o622)
                own = (receptions[0].fileno(), outputs[0])
                pid = self._spawn(spawn, identity, outputs[1], receptions[1].fileno(), own)
            except OSError as error:
                self._send(messages.SpawnFailed(str(error)))
                return
            self._workers.add(pid)
            self._send_worker(messages.Spawned(pid, problem), own)

    def _can_fork(self, preload: Sequence[str]) -> bool:
        """Import the modules that the worker needs. Returns whether the zygote still has a single thread."""
        self._modules.load(preload)
        if len(list(Path("/proc/self/task").iterdir())) == 1:
            return True
        if not self._warned_of_threads:
            self._warned_of_threads = True
            print("the zygote has several threads after its imports; workers are started by exec", file=sys.stderr)
        return False

    def _spawn(
        self, spawn: messages.Spawn, identity: Identity | None, output: int, reception: int, servers: Sequence[int]
    ) -> int:
        """`servers`: descriptors that the child closes."""
        options = spawn.options
        forked = options.forked and self._can_fork(options.preload)
        if not forked:
            if shutil.which(options.interpreter or sys.executable) is None:
                raise FileNotFoundError(f"there is no Python interpreter '{options.interpreter}'")
            if options.loader and shutil.which(options.loader[0]) is None:
                raise FileNotFoundError(f"there is no program loader '{options.loader[0]}' for the worker's Python")
        pid = os.fork()
        if pid:
            return pid
        status = 70
        try:
            self._leave(servers)
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

    def _leave(self, servers: Sequence[int]) -> None:
        """Close all of the zygote's descriptors in a new child, and lead a new process group, with which processes that
        a model starts will end."""
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in (self._child_ended, self._child_ended_writer, self._kept, *servers):
            os.close(descriptor)
        self._connection.close()

    def _execute(self, options: messages.LaunchOptions, reception: int) -> None:
        handed = [self._parent_pipe, reception]
        for descriptor in handed:
            os.set_inheritable(descriptor, True)
        # A program loader does not search PATH for the program that it starts.
        interpreter = options.interpreter or sys.executable
        python = [*options.loader, shutil.which(interpreter) or interpreter] if options.loader else [interpreter]
        command = [*python, bootstrap.__file__, worker.__name__, options.title, *map(str, handed)]
        os.execvp(command[0], command)

    def _reap(self) -> None:
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            is_worker = ended.si_pid in self._workers
            if is_worker:
                # Until the worker is reaped, its number cannot belong to another group.
                _end_group(ended.si_pid)
                self._workers.discard(ended.si_pid)
            pid, status = os.waitpid(ended.si_pid, 0)
            if is_worker:
                self._send(messages.Exited(pid, status))

    def _send_worker(self, message: messages.Spawned, descriptors: Sequence[int]) -> None:
        """Send Spawned. Only the zygote reaps the worker, so its number is valid for the pidfd, which comes last."""
        pidfds: list[int] = []
        with suppress(OSError):
            pidfds.append(os.pidfd_open(message.pid))
        try:
            send_with_descriptors(self._connection, messages.encode_message(message), (*descriptors, *pidfds))
        finally:
            for pidfd in pidfds:
                os.close(pidfd)

    def _send(self, message: messages.Message) -> None:
        self._connection.send(messages.encode_message(message))


def _end_group(leader: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
