"""Runs the real server as a process, which writes its log to a file."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import tritonclient.grpc as triton

from support.processes import command_of, has_ended, name_of, send, wait_until_ended
from support.waiting import LOAD_CHECK_SECONDS, PATIENCE_SECONDS, wait_until

_DYING_WITH_PARENT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"
"""A program that becomes the one in its arguments, after PR_SET_PDEATHSIG with SIGKILL. To set it between fork and exec
would take a fork of this process, and gRPC's handlers of a fork may hang."""
_FRONT_END = "rocserve:front:"
_STARTED = re.compile(r'Started (GRPCInference|HTTP)Service at \S+?:(\d+)[",\n]')


class RocserveProcess:
    """`rocserve serve` on a free port; a context manager that ends it. With `outlives=False` the kernel kills the
    server when this object's process ends."""

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
        program: Sequence[str] = ("-m", "rocserve.cli"),
    ) -> None:
        """`program`: what runs the command `rocserve`."""
        self.repositories = repositories
        self._environment = environment or {}
        # The kernel means the thread that has started the process, and tests start it again from threads that end.
        self._starter = None if outlives else ThreadPoolExecutor(1)
        self._command = [
            *(() if outlives else (sys.executable, "-c", _DYING_WITH_PARENT)),
            python,
            *program,
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
            # On a busy machine the default would leave rows undecided, and then nothing is batched.
            f"--load-check-seconds={LOAD_CHECK_SECONDS:g}",
            *flags,
        ]
        self._log = log
        self._printed = log.with_suffix(".out")
        self._begins = 0
        """Where the log of the process begins: a server that is started again goes on with the log."""
        self._last_started = "HTTP" if "--allow-grpc=false" in flags else "GRPCInference"
        self.port = 0
        self.http_port = 0
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def begin(self, *more_flags: str) -> None:
        """Start the process, without waiting for it."""
        if self.process is not None:
            self._begins = len(self.log_text)
        if self._starter is None:
            self._begin(more_flags)
        else:
            self._starter.submit(self._begin, more_flags).result()

    def _begin(self, more_flags: Sequence[str]) -> None:
        # The server writes to the file itself: what it has written before an event is in the log after the event.
        with self._log.open("w" if self.process is None else "a") as log, self._printed.open("w") as printed:
            self.process = subprocess.Popen(
                [*self._command, *more_flags],
                stdout=printed,
                stderr=log,
                # Plain messages: in JSON the quotes in them would be escaped.
                env={"TRITON_SERVER_ESCAPE_LOG_MESSAGES": "0", **os.environ, **self._environment},
                # A separate process group, which a test may signal as a whole.
                start_new_session=True,
            )

    def start(self, *more_flags: str) -> None:
        self.begin(*more_flags)
        try:
            wait_until(self._has_started_or_ended)
        except AssertionError:
            at = [_state(one) for one in self.family()]
            self.kill()
            raise AssertionError(f"the server did not start: {at}\n{self.log_text}") from None

    def restart(self, number: int = signal.SIGKILL) -> None:
        """Kill the server's process, and start another on the same ports, as a service manager does."""
        family = self.family()
        self.server_process().send_signal(number)
        assert self.process is not None
        self.process.wait(PATIENCE_SECONDS)
        wait_until_ended(family)
        ports = {"grpc": self.port, "http": self.http_port}
        self.start(*(f"--{name}-port={port}" for name, port in ports.items() if port))

    def _has_started_or_ended(self) -> bool:
        assert self.process is not None
        has_ended = self.process.poll() is not None
        started = dict(_STARTED.findall(self.log_text, self._begins))
        self.http_port = int(started.get("HTTP", self.http_port))
        self.port = int(started.get("GRPCInference", self.port))
        return self._last_started in started or has_ended

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
        return self._log.read_text(errors="replace")

    def client(self) -> triton.InferenceServerClient:
        return triton.InferenceServerClient(self.address)

    def wait_until_ready(self) -> None:
        client = self.client()
        try:
            wait_until(client.is_server_ready, "readiness")
        except AssertionError as error:
            raise AssertionError(f"{error}; the log says:\n{self.log_text}") from None

    def family(self) -> list[psutil.Process]:
        """All processes that the server has started: they stay in its session even if their parent ends."""
        assert self.process is not None
        leader = self.process.pid
        return [process for process in psutil.process_iter() if process.pid != leader and _session(process) == leader]

    def server_process(self) -> psutil.Process:
        """The process that was started."""
        assert self.process is not None
        return psutil.Process(self.process.pid)

    def resident_bytes(self) -> int:
        return int(self.server_process().memory_info().rss)

    def workers(self, model: str = "") -> list[psutil.Process]:
        """The processes that hold models, or this model. A process that has just ended may not have been reaped."""
        named = f"rocserve:{model}"[:_NAME_BYTES]
        return [
            process
            for process in self.family()
            if _is_worker(process) and (not model or name_of(process) == named) and not has_ended(process.pid)
        ]

    def front_ends(self) -> list[psutil.Process]:
        """The processes that serve clients, if the server's own process does not."""
        return [
            process
            for process in self.family()
            if name_of(process).startswith(_FRONT_END) and not has_ended(process.pid)
        ]

    def zygote(self) -> psutil.Process | None:
        """The process that forks workers."""
        children = (process for process in self.family() if not _is_worker(process))
        return next((process for process in children if "rocserve.workers.zygote" in command_of(process)), None)

    def terminate(self, seconds: float = PATIENCE_SECONDS) -> int:
        """Send SIGTERM, and wait for the end. Returns the exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def begin_end(self, whole_group: bool = False) -> None:
        """Send SIGTERM, and wait until the server ends its work. `whole_group`: send it also to the server's group and
        to workers."""
        assert self.process is not None
        if whole_group:
            # Workers have separate process groups; systemd and other service managers signal every process.
            for worker in self.workers():
                send(worker, signal.SIGTERM)
            os.killpg(self.process.pid, signal.SIGTERM)
        else:
            self.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "finishing the work in flight" in self.log_text, "the end's beginning")

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(PATIENCE_SECONDS)


def _session(process: psutil.Process) -> int:
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return 0  # The process ended meanwhile.


def _state(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        return f"{process.name()} {process.status()} {process.cpu_times()}"
    return "ended meanwhile"


_NAME_BYTES = 15
"""The kernel cuts a process's name here."""


def _is_worker(process: psutil.Process) -> bool:
    name = name_of(process)
    return name.startswith("rocserve:") and not name.startswith(_FRONT_END)


Start = Callable[..., RocserveProcess]
"""The fixture `start`: takes a repository and flags, returns a server that is ready."""
