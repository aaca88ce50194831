"""Runs the real server as a process, and keeps its log for the report of a failure."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import tritonclient.grpc as triton

from support.waiting import PATIENCE_SECONDS, wait_until

_PR_SET_PDEATHSIG = 1
_FRONT_ENDS = ("rocserve:grpc:", "rocserve:http:")
_STARTED = re.compile(r"Started (GRPCInference|HTTP)Service at \S+?:(\d+)")


class RocserveProcess:
    """`rocserve serve` on a free port; a context manager that ends it. With `outlives=False` the kernel kills the
    server when the thread that started it ends."""

    default_front_ends = 0
    """The number of front ends unless a flag says otherwise; pytest's --front-ends sets it."""

    def __init__(
        self,
        repositories: Sequence[Path],
        *flags: str,
        log: Path,
        environment: Mapping[str, str] | None = None,
        outlives: bool = True,
        python: str = sys.executable,
    ) -> None:
        self.repositories = repositories
        self._environment = environment or {}
        libc = ctypes.CDLL(None)
        self._before_exec = None if outlives else partial(libc.prctl, _PR_SET_PDEATHSIG, signal.SIGKILL)
        self._command = [
            python,
            "-m",
            "rocserve.cli",
            "serve",
            *(f"--model-repository={repository}" for repository in repositories),
            "--grpc-address=127.0.0.1",
            "--grpc-port=0",
            "--http-address=127.0.0.1",
            "--http-port=0",
            "--allow-metrics=false",
            "--exit-on-error=false",
            # The default would depend on the number of CPUs.
            f"--front-ends={self.default_front_ends}",
            *flags,
        ]
        self._log = log
        self._printed = log.with_suffix(".out")
        self._lines: list[str] = []
        self._port_known = threading.Event()
        self._last_started = "HTTP" if "--allow-grpc=false" in flags else "GRPCInference"
        self.port = 0
        self.http_port = 0
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self._command,
            stdout=self._printed.open("w"),
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            # Plain messages: in JSON the quotes in them would be escaped.
            env={"TRITON_SERVER_ESCAPE_LOG_MESSAGES": "0", **os.environ, **self._environment},
            preexec_fn=self._before_exec,  # noqa: PLW1509 - one call of the C library
            # A separate process group, which a test may signal as a whole.
            start_new_session=True,
        )
        threading.Thread(target=self._read_log, daemon=True).start()
        if not self._port_known.wait(PATIENCE_SECONDS):
            at = [f"{each.name()} {each.status()} {each.cpu_times()}" for each in self.family()]
            self.kill()
            raise AssertionError(f"the server did not start: {at}\n{self.log_text}")

    def _read_log(self) -> None:
        assert self.process is not None
        assert self.process.stderr is not None
        with self._log.open("w") as file:
            for line in self.process.stderr:
                file.write(line)
                file.flush()
                self._lines.append(line)
                if found := _STARTED.search(line):
                    self._note_port(found[1], int(found[2]))
        # A server that fails at its start must not make the test wait.
        self._port_known.set()

    def _note_port(self, service: str, port: int) -> None:
        if service == "HTTP":
            self.http_port = port
        else:
            self.port = port
        if service == self._last_started:
            self._port_known.set()

    @property
    def http_address(self) -> str:
        return f"127.0.0.1:{self.http_port}"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def printed(self) -> str:
        """What the server has written to standard output."""
        return self._printed.read_text()

    @property
    def log_text(self) -> str:
        return "".join(self._lines)

    def client(self) -> triton.InferenceServerClient:
        return triton.InferenceServerClient(self.address)

    def wait_until_ready(self) -> None:
        client = self.client()
        wait_until(client.is_server_ready, f"readiness; the log says:\n{self.log_text}")

    def family(self) -> list[psutil.Process]:
        """All processes of the server but the supervisor: they stay in its session even if their parent ends."""
        assert self.process is not None
        leader = self.process.pid
        return [process for process in psutil.process_iter() if process.pid != leader and _session(process) == leader]

    def server_process(self) -> psutil.Process:
        """The process that serves; the process that was started is its supervisor. Waits while there is none."""
        assert self.process is not None
        supervisor = psutil.Process(self.process.pid)
        found: list[psutil.Process] = []

        def is_there() -> bool:
            found[:] = supervisor.children()
            return bool(found)

        wait_until(is_there, "the server's process")
        return found[0]

    def resident_bytes(self) -> int:
        return int(self.server_process().memory_info().rss)

    def workers(self, model: str = "") -> list[psutil.Process]:
        """The processes that hold models, or this model."""
        start = f"rocserve:{model}"[:_NAME_BYTES]
        return [process for process in self.family() if _is_worker(process) and _name(process).startswith(start)]

    def front_ends(self, protocol: str = "grpc") -> list[psutil.Process]:
        """The processes that serve clients of a protocol, grpc or http."""
        return [
            process
            for process in self.family()
            # A process that has just ended may not have been reaped.
            if _name(process).startswith(f"rocserve:{protocol}:") and not _has_ended(process)
        ]

    def zygote(self) -> psutil.Process | None:
        """The process that forks workers."""
        children = (process for process in self.family() if not _is_worker(process))
        return next((process for process in children if "rocserve.workers.zygote" in _command(process)), None)

    def terminate(self, seconds: float = 40.0, whole_group: bool = False) -> int:
        """Send SIGTERM to the supervisor; `whole_group`: also to its group and to workers. Returns the exit status."""
        assert self.process is not None
        if whole_group:
            # Workers have separate process groups; systemd and other service managers signal every process.
            for worker in self.workers():
                worker.send_signal(signal.SIGTERM)
            os.killpg(self.process.pid, signal.SIGTERM)
        else:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)


def _session(process: psutil.Process) -> int:
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return 0  # The process ended meanwhile.


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""  # The process ended meanwhile.


_NAME_BYTES = 15
"""The kernel cuts a process's name here."""


def _is_worker(process: psutil.Process) -> bool:
    name = _name(process)
    return name.startswith("rocserve:") and not name.startswith(_FRONT_ENDS)


def _has_ended(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    return True


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""  # The process ended meanwhile.


Start = Callable[..., RocserveProcess]
"""The fixture `start`: takes a repository and flags, returns a server that is ready."""
