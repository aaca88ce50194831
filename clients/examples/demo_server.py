"""Runs a rocserve server in a separate process for the demo."""

from __future__ import annotations

import signal
import socket
import subprocess
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import tritonclient.grpc as triton

START_TIMEOUT_S = 300.0
"""A busy machine takes long to load the models; a server that ends earlier is noticed at once."""
STOP_TIMEOUT_S = 90.0
"""The server itself ends what is in flight after 30 s."""


@contextmanager
def running_server(
    repository: Path, models: Sequence[str], log: Path, start_timeout_s: float = START_TIMEOUT_S
) -> Iterator[str]:
    """Yield the address of a server whose `models` are ready; SIGTERM stops the server at the end. Raises SystemExit if
    the server did not become ready, or did not end with exit status 0."""
    port = _free_port()
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [str(Path(sysconfig.get_path("scripts")) / "rocserve"), "serve", "--model-repository", str(repository)]
    command += ["--grpc-address", "127.0.0.1", "--grpc-port", str(port)]
    command += ["--allow-http=false", "--allow-metrics=false"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait_until_ready(process, f"127.0.0.1:{port}", models, log, start_timeout_s)
        yield f"127.0.0.1:{port}"
        process.send_signal(signal.SIGTERM)
        status = process.wait(STOP_TIMEOUT_S)
        if status != 0:
            raise SystemExit(f"the server ended with exit status {status}{_last_lines(log)}")
    except subprocess.TimeoutExpired:
        raise SystemExit(f"the server did not end within {STOP_TIMEOUT_S:g} s of SIGTERM{_last_lines(log)}") from None
    finally:
        process.kill()
        process.wait()


def _wait_until_ready(
    process: subprocess.Popen[bytes], address: str, models: Sequence[str], log: Path, timeout_s: float
) -> None:
    end = time.monotonic() + timeout_s
    with triton.InferenceServerClient(address) as client:
        while time.monotonic() < end:
            if process.poll() is not None:
                raise SystemExit(f"the server ended with exit status {process.returncode}{_last_lines(log)}")
            try:
                if all(client.is_model_ready(model, client_timeout=1.0) for model in models):
                    return
            except triton.InferenceServerException:
                pass  # The server does not listen yet.
            time.sleep(0.05)
    raise SystemExit(f"not all of {', '.join(models)} are ready after {timeout_s:g} s{_last_lines(log)}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _last_lines(log: Path, count: int = 20) -> str:
    lines = log.read_text(errors="replace").splitlines()[-count:]
    return f"; the end of its log, {log}:\n" + "\n".join(lines)
