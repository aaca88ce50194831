"""How long a server is away that is killed (kill -9) and started again at once, with warm caches: `python -m
benchmarks.restart`. A service manager adds its own pause, systemd 0.1 s."""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy
import psutil
from tritonclient.http import InferenceServerClient, InferInput

from benchmarks.machine import machine_facts
from benchmarks.rocserve_peer import rocserve_program
from benchmarks.server_process import START_SECONDS, free_port, http_flags

_CHECKOUT = Path(__file__).parents[1]
_MODEL, _INPUT, _SHAPE = "digits_classifier", "IMAGE", (1, 1, 16, 16)
_POLL_SECONDS = 0.002


def main() -> int:
    options = parse_arguments()
    ports = (free_port(), free_port())
    command = [
        *(str(rocserve_program()), "serve", f"--model-repository={options.repository}"),
        *("--grpc-address=127.0.0.1", f"--grpc-port={ports[0]}", *http_flags(ports[1])),
        *("--allow-metrics=false", "--exit-on-error=false", *options.flags),
    ]
    took: dict[str, list[float]] = {"all processes have ended": [], "live": [], "READY": [], "an answer": []}
    with tempfile.TemporaryFile() as log:

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

        process = start()
        try:
            with InferenceServerClient(f"127.0.0.1:{ports[1]}") as client:
                wait_until(client.is_server_ready)
                expected = answer(client)
            for _ in range(options.times):
                family = psutil.Process(process.pid).children(recursive=True)
                began = time.monotonic()
                process.kill()
                process.wait()
                wait_until(lambda one=family: not any(map(runs, one)))
                took["all processes have ended"].append(time.monotonic() - began)
                process = start()
                with InferenceServerClient(f"127.0.0.1:{ports[1]}") as client:
                    for what, ask in (("live", client.is_server_live), ("READY", client.is_server_ready)):
                        wait_until(ask)
                        took[what].append(time.monotonic() - began)
                    if (answer(client) != expected).any():
                        raise RuntimeError(f"{_MODEL} answers otherwise after a restart")
                    took["an answer"].append(time.monotonic() - began)
                time.sleep(options.rest)
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
    print(f"# Killed and started again, {options.times} times\n")
    print("\n".join(f"- {fact}" for fact in machine_facts(None)))
    print("\n| seconds after the kill until | median | most |\n|---|---|---|")
    for what, seconds in took.items():
        print(f"| {what} | {statistics.median(seconds):.2f} | {max(seconds):.2f} |")
    return 0


def answer(client: InferenceServerClient) -> numpy.ndarray:
    entry = InferInput(_INPUT, list(_SHAPE), "FP32")
    entry.set_data_from_numpy(numpy.linspace(0, 1, 256, dtype=numpy.float32).reshape(_SHAPE))
    return client.infer(_MODEL, [entry]).as_numpy("PROBABILITIES")


def runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(is_so: Callable[[], bool]) -> None:
    """Raises TimeoutError."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError):  # Nobody listens.
            if is_so():
                return
        time.sleep(_POLL_SECONDS)
    raise TimeoutError(f"not within {START_SECONDS:g} s")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repository", type=Path, default=_CHECKOUT / "model_repository")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--rest", type=float, default=1.0, help="seconds between two kills")
    parser.add_argument("flags", nargs="*", help="further flags of the server, after --")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
