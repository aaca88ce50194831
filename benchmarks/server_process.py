"""A measured server as a separate process: started, waited for, ended with all its children."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

START_SECONDS = 120.0
STOP_SECONDS = 15.0
MESSAGE_BYTES = 64 << 20
"""Longest gRPC message that the benchmarks' clients send or accept."""
_KERNELS_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT = 10_000
_RANDOM = random.SystemRandom()
"""Concurrent runs with the same seed must not choose the same port."""


def free_port() -> int:
    """A free TCP port outside of the range from which the kernel chooses ports for connections."""
    # If the kernel chooses from nearly all ports, nothing can be avoided.
    end = max(int(_KERNELS_PORTS.read_text().split()[0]), 2 * _FIRST_PORT)
    while True:
        port = _RANDOM.randrange(_FIRST_PORT, end)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port


def run_seconds(process: psutil.Process) -> float:
    """CPU time of the living threads of a process, to the nanosecond if the kernel counts so. Raises
    psutil.NoSuchProcess if it has ended."""
    nanoseconds = 0
    for thread in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
        with suppress(OSError):  # The thread has ended meanwhile.
            # The first number is the time on a CPU (sched-stats.rst).
            nanoseconds += int(thread.read_text().split()[0])
    if nanoseconds:
        return nanoseconds * 1e-9
    times = process.cpu_times()
    return float(times.user + times.system)


def http_flags(port: int | None) -> tuple[str, ...]:
    """The flags with which both servers listen for HTTP on a loopback port; None = no HTTP."""
    return ("--allow-http=false",) if port is None else ("--http-address=127.0.0.1", f"--http-port={port}")


UNIX = "unix:"
"""The beginning of the address of a Unix socket; its path follows."""


def socket_of(command: Sequence[str], protocol: str) -> str | None:
    """The address of the Unix socket that the command's last flag for `grpc` or `http` names; None = a TCP port."""
    flag = f"--{protocol}-address="
    named = [word.removeprefix(flag) for word in command if word.startswith(flag)]
    return named[-1] if named and named[-1].startswith(UNIX) else None


class ServerFailed(RuntimeError):
    """A server did not start; the message ends with the last lines of its log."""


class ServerProcess:
    """One server, as a context manager: running and ready inside the block, ended after it."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        port: int | None,
        log_file: Path,
        environment: Mapping[str, str] | None = None,
        clean_up: Callable[[], None] | None = None,
        http_port: int | None = None,
        ready_path: str = "",
        poll_seconds: float = 0.1,
    ) -> None:
        """`port`: the gRPC port that the command names; None = it speaks HTTP only. `clean_up`: called after the
        server's end. `http_port`: of HTTP. `ready_path`: the HTTP path that shows readiness; "" = gRPC does.
        `poll_seconds`: between two questions whether it is ready."""
        self.name = name
        self.port = port
        self.http_port = http_port
        self.log_file = log_file
        self._command = list(command)
        self._environment = dict(environment) if environment is not None else None
        self._clean_up = clean_up
        self._ready_path = ready_path
        self._poll_seconds = poll_seconds
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """HOST:PORT, or unix:PATH."""
        return socket_of(self._command, "grpc") or f"127.0.0.1:{self.port}"

    @property
    def http_address(self) -> str:
        """HOST:PORT, or unix:PATH. Raises ValueError if it does not serve HTTP."""
        if self.http_port is None:
            raise ValueError(f"{self.name} was started without HTTP")
        return socket_of(self._command, "http") or f"127.0.0.1:{self.http_port}"

    def __enter__(self) -> Self:
        """Start, and return once the server is ready. Raises ServerFailed if the process ends or is not ready in
        time."""
        with self.log_file.open("wb") as log:
            # A separate session, so that its workers can be ended with it, and Ctrl-C reaches the benchmark alone.
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=self._environment, start_new_session=True
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def cpu_seconds(self) -> float:
        """CPU time used so far by the server and its living children, user and system."""
        return sum(self.cpu_seconds_by_process().values())

    def cpu_seconds_by_process(self) -> dict[tuple[int, str], float]:
        """The CPU time of each process, by its number and name: first the server, then its living children."""
        assert self._process is not None
        seconds: dict[tuple[int, str], float] = {}
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._process.pid)
            for process in [root, *root.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    seconds[process.pid, process.name()] = run_seconds(process)
        return seconds

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerFailed(
                    f"{self.name} ended with status {self._process.returncode} before it was ready;"
                    f" its log ends with:\n{self._log_tail()}"
                )
            if self._is_ready():
                return
            time.sleep(self._poll_seconds)
        raise ServerFailed(
            f"{self.name} was not ready within {START_SECONDS:.0f} s; its log ends with:\n{self._log_tail()}"
        )

    def _is_ready(self) -> bool:
        if self._ready_path:
            connection = HTTPConnection(self.http_address, timeout=1.0)
            with suppress(OSError, HTTPException), closing(connection):
                connection.request("GET", self._ready_path)
                return connection.getresponse().status == HTTPStatus.OK
            return False
        with suppress(InferenceServerException), InferenceServerClient(self.address) as client:
            return bool(client.is_server_ready(client_timeout=1.0))
        return False

    def _log_tail(self) -> str:
        lines = self.log_file.read_text(errors="replace").splitlines()
        return "\n".join(lines[-25:])

    def _stop(self) -> None:
        """SIGTERM, then SIGKILL for the rest of the session."""
        process = self._process
        if process is None:
            return
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._process = None
        if self._clean_up is not None:
            self._clean_up()
