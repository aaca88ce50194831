"""The zygote's loop: takes requests for workers, starts them and tells of their ends."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

from rocserve.workers import main as worker
from rocserve.workers.isolation import Identity, choose, confine
from rocserve.workers.messages import Exited, Spawn, Spawned, SpawnFailed, ZygoteMessage
from rocserve.workers.wire import decode_message, encode_message

MOST_DESCRIPTORS = 250
"""Linux lets 253 pass in one message."""
_LONGEST_MESSAGE = 1024 * 1024


class Spawner:
    """Serves the server on one connection; one thread."""

    def __init__(self, connection: socket.socket, lifeline: int, kept: int) -> None:
        self._connection = connection
        self._lifeline = lifeline
        self._kept = kept
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
        """Take one message; False when the server is gone."""
        data, descriptors, _, _ = socket.recv_fds(
            self._connection, _LONGEST_MESSAGE, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        if not data:
            return False
        spawn = decode_message(data)
        if not isinstance(spawn, Spawn):
            raise ValueError(f"expected Spawn, got {type(spawn).__name__}")
        try:
            identity, problem = choose(spawn.confinement, _program_files(spawn))
            pid = self._spawn(spawn, identity, descriptors)
        except OSError as error:
            self._send(SpawnFailed(spawn.spawn_id, str(error)))
            return True
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._send_spawned(Spawned(spawn.spawn_id, pid, problem))
        return True

    def _spawn(self, spawn: Spawn, identity: Identity | None, descriptors: list[int]) -> int:
        interpreter = spawn.interpreter or sys.executable
        forked = spawn.forked and self._single_threaded
        if not forked:
            _check_command(interpreter, spawn.loader)
        pid = os.fork()
        if pid:
            return pid
        status = 70
        try:
            self._leave()
            output, control, *channels = descriptors
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            os.environ.update(spawn.environment)
            confine(identity, spawn.confinement)
            if not forked:
                self._execute(spawn, interpreter, [control, *channels])
            _reseed()
            status = worker.run(spawn.title, self._lifeline, control, channels)
        except BaseException as error:
            os.write(2, f"the worker could not be started: {error!r}\n".encode())
        finally:
            _flush_output()
            # Not sys.exit: what the zygote's modules have registered for its end is not the worker's.
            os._exit(status)

    def _leave(self) -> None:
        """In a new child: let go of what is the zygote's.

        It leads a process group of its own, to which the processes belong that a model starts: they end with it.
        """
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(self._child_ended)
        os.close(self._child_ended_writer)
        os.close(self._kept)
        self._connection.close()

    def _execute(self, spawn: Spawn, interpreter: str, descriptors: list[int]) -> None:
        handed = [self._lifeline, *descriptors]
        for descriptor in handed:
            os.set_inheritable(descriptor, True)
        bootstrap = Path(__file__).with_name("bootstrap.py")
        # A program loader does not search the path for what it starts.
        python = [*spawn.loader, shutil.which(interpreter) or interpreter] if spawn.loader else [interpreter]
        command = [*python, str(bootstrap), worker.__name__, spawn.title, *map(str, handed)]
        os.execvp(command[0], command)

    def _reap(self) -> None:
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            # Before the worker is reaped its number is surely its own.
            _end_group(ended.si_pid)
            self._send(Exited(*os.waitpid(ended.si_pid, 0)))

    def _send_spawned(self, spawned: Spawned) -> None:
        """Nobody but the zygote reaps the worker, so the pidfd is surely the worker's."""
        message = encode_message(spawned)
        try:
            descriptor = os.pidfd_open(spawned.pid)
        except OSError:
            self._connection.send(message)
            return
        socket.send_fds(self._connection, [message], [descriptor])
        os.close(descriptor)

    def _send(self, message: ZygoteMessage) -> None:
        self._connection.send(encode_message(message))


def _program_files(spawn: Spawn) -> list[str]:
    """What the worker's Python reads: its interpreter, its loader, and where it imports from."""
    files = [shutil.which(spawn.interpreter or sys.executable) or "", str(Path(__file__).parent)]
    for word in spawn.loader:
        files += word.split(":")
    if not spawn.interpreter:
        files += sys.path
    return [file for file in files if file.startswith("/")]


def _check_command(interpreter: str, loader: tuple[str, ...]) -> None:
    """Raises: FileNotFoundError: what the command begins with is not there."""
    if shutil.which(interpreter) is None:
        raise FileNotFoundError(f"there is no Python interpreter '{interpreter}'")
    if loader and shutil.which(loader[0]) is None:
        raise FileNotFoundError(f"there is no '{loader[0]}', which is to start the worker's Python")


def _end_group(leader: int) -> None:
    """End what a worker has started and left behind."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        # A model may have closed or replaced them.
        with suppress(Exception):
            stream.flush()


def _reseed() -> None:
    """Workers must not all draw the zygote's random numbers; Python's own module sees to itself."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
