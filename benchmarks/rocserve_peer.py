"""The rocserve of a checkout as a separate process, started by its command like a user's."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.server_process import ServerFailed, ServerProcess, http_flags


def rocserve_program() -> Path:
    """The command of the environment that runs the benchmarks. Raises ServerFailed if rocserve is not installed
    there."""
    program = Path(sys.executable).parent / "rocserve"
    if not program.is_file():
        raise ServerFailed(f"there is no {program}; run `make setup` first")
    return program


def rocserve_server(
    repository: Path,
    port: int,
    log_file: Path,
    *flags: str,
    http_port: int | None = None,
    name: str = "rocserve",
    tree: Path | None = None,
    poll_seconds: float | None = None,
) -> ServerProcess:
    """The server on a model repository; metrics are off, because none is measured.

    Args:
        flags: further flags.
        http_port: None = without HTTP.
        tree: the checkout whose code runs; None = the version that is installed where the benchmarks run.
        poll_seconds: between two questions over HTTP whether it is ready; None = it is asked seldom, over gRPC.
    """
    command = [
        *([str(rocserve_program())] if tree is None else [sys.executable, "-m", "rocserve.cli"]),
        "serve",
        f"--model-repository={repository}",
        "--grpc-address=127.0.0.1",
        f"--grpc-port={port}",
        *http_flags(http_port),
        "--allow-metrics=false",
        "--allow-client-shm=true",
        *flags,
    ]
    environment = None
    if tree is not None:
        path = [f"{tree}/server", f"{tree}/clients", *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    ready = {} if poll_seconds is None else {"ready_path": "/v2/health/ready", "poll_seconds": poll_seconds}
    return ServerProcess(name, command, port, log_file, environment, http_port=http_port, **ready)
