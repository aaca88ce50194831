"""Thousands of registered models, of which some are loaded: what that costs, and what a cold request waits.

usage: python -m benchmarks.many_models [--models 10000] [--resident 100] [--seconds 120] [--write NAME]
       python -m benchmarks.many_models --models 500 --shared-workers 2 [--write NAME]

The models are alike: INT32 sums and differences by ONNX Runtime. CPU time is that of all the server's threads and
workers; memory is the server process's own, without its workers. Under load clients ask models by Zipf's law, each one
request after another; every answer is compared. With --shared-workers all models are loaded, in so many processes: what
they take is the memory of all of the server's processes, what is shared in equal parts (PSS).
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from benchmarks.machine import machine_facts
from benchmarks.models import add_sub
from benchmarks.rocserve_peer import rocserve_server
from benchmarks.server_process import ServerProcess, free_port, run_seconds

_CLIENTS = 4
_COLD = 200
"""Cold requests, one at a time."""
_IDLE_SECONDS = 30.0
_DROPS = 5
_ROUNDS = 10
"""Rounds of requests to all loaded models."""
_RESULTS = Path(__file__).parent / "results"


class Asker:
    """A client that checks its answers."""

    def __init__(self, address: str) -> None:
        self._client = InferenceServerClient(address)
        self._values = np.arange(16, dtype=np.int32).reshape(1, 16)
        self._inputs = [InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
        for one in self._inputs:
            one.set_data_from_numpy(self._values)

    def seconds(self, name: str) -> float:
        """Seconds of a request. Raises InferenceServerException, or AssertionError if the answer was wrong."""
        began = time.perf_counter()
        answer = self._client.infer(name, self._inputs, client_timeout=60)
        took = time.perf_counter() - began
        assert np.array_equal(answer.as_numpy("OUTPUT0"), 2 * self._values), f"{name} gave a wrong sum"
        return took

    def wait_for(self, name: str) -> None:
        while not self._client.is_model_ready(name):
            time.sleep(0.01)


def main() -> int:
    options = parse_arguments()
    facts = machine_facts(None)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        names = [f"m{number:05d}" for number in range(options.models)]
        for name in names:
            add_sub(name, dynamic_batching=False).write_for_rocserve(folder / "models")
        limit = f"--max-loaded-models={options.resident}"
        server = rocserve_server(
            folder / "models",
            free_port(),
            folder / "log",
            limit if options.shared_workers is None else f"--shared-workers={options.shared_workers}",
            tree=Path(__file__).parents[1],
        )
        time.sleep(2.0)  # The server waits until younger files have settled.
        began = time.monotonic()
        with server:
            rows = [("start until ready, s", f"{time.monotonic() - began:.1f}")]
            rows.append(("CPU time of the start, s", f"{server.cpu_seconds():.1f}"))
            if options.shared_workers is None:
                title = f"{options.models} models registered, {options.resident} loaded"
                rows += measure(server, folder, names, options)
            else:
                title = f"{options.models} models loaded, --shared-workers={options.shared_workers}"
                rows += measure_loaded(server, names)
    page = "\n".join(
        (
            f"# {title}",
            "",
            *(f"- {fact}" for fact in facts),
            "",
            "| what | |",
            "|---|---|",
            *(f"| {what} | {value} |" for what, value in rows),
        )
    )
    print(page)
    if options.write:
        (_RESULTS / f"{options.write}.md").write_text(page + "\n")
    return 0


def measure(
    server: ServerProcess, folder: Path, names: list[str], options: argparse.Namespace
) -> list[tuple[str, str]]:
    process = own_process(server)
    rows = [("memory of the server when ready, MB", megabytes(process))]
    asker = Asker(server.address)
    dice = random.Random(1)
    for name in names[: options.resident]:
        asker.seconds(name)
    cold = sorted(asker.seconds(name) for name in dice.sample(names[options.resident :], _COLD))
    rows.append(("cold request, one at a time, ms: median / p95 / most", in_milliseconds(cold)))
    warm = sorted(asker.seconds(name) for name in [dice.choice(names[:1])] * _COLD)
    rows.append(("request to a loaded model, ms: median / p95 / most", in_milliseconds(warm)))
    rows.append(("CPU of the idle server, %", idle_percent(lambda: run_seconds(process))))
    drops = sorted(drop_seconds(asker, folder, f"new{number}") for number in range(_DROPS))
    shown = f"{statistics.median(drops):.2f} / {drops[-1]:.2f}"
    rows.append(("a dropped model is served after, s: median / most", shown))
    rows += under_load(server, names, options.seconds)
    rows.append(("memory of the server after it, MB", megabytes(process)))
    return rows


def measure_loaded(server: ServerProcess, names: list[str]) -> list[tuple[str, str]]:
    asker = Asker(server.address)
    took = sorted(asker.seconds(name) for _ in range(_ROUNDS) for name in names)
    processes = [psutil.Process(pid) for pid, _ in server.cpu_seconds_by_process()]
    own = own_process(server)
    memory = sum(process.memory_full_info().pss for process in processes)
    return [
        (f"{len(took)} requests, each model in turn, ms: median / p95 / most", in_milliseconds(took)),
        ("of these failed or wrong", "0"),
        ("processes", str(len(processes))),
        ("memory of all, MB", f"{memory / 1e6:.0f}"),
        ("memory of the server, MB", megabytes(own)),
        ("descriptors of the server", str(own.num_fds())),
        ("descriptors of all others", str(sum(one.num_fds() for one in processes if one != own))),
        ("CPU of the idle server and its workers, %", idle_percent(server.cpu_seconds)),
    ]


def idle_percent(cpu_seconds: Callable[[], float]) -> str:
    """Percent of one CPU."""
    began, used = time.monotonic(), cpu_seconds()
    time.sleep(_IDLE_SECONDS)
    return f"{100 * (cpu_seconds() - used) / (time.monotonic() - began):.2f}"


def drop_seconds(asker: Asker, folder: Path, name: str) -> float:
    add_sub(name, dynamic_batching=False).write_for_rocserve(folder / "models")
    began = time.monotonic()
    asker.wait_for(name)
    return time.monotonic() - began


def under_load(server: ServerProcess, names: list[str], seconds: float) -> list[tuple[str, str]]:
    """Let clients send requests for this time."""
    weights = list(itertools.accumulate(1 / rank for rank in range(1, len(names) + 1)))
    end = time.monotonic() + seconds
    took: list[float] = []
    failures: list[str] = []

    def ask(seed: int) -> None:
        dice, asker = random.Random(seed), Asker(server.address)
        while time.monotonic() < end:
            try:
                took.append(asker.seconds(dice.choices(names, cum_weights=weights)[0]))
            except (InferenceServerException, AssertionError) as error:
                failures.append(str(error))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(_CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took.sort()
    return [
        (f"Zipf's law, {_CLIENTS} clients, {seconds:.0f} s: requests / failed", f"{len(took)} / {len(failures)}"),
        ("of these, ms: median / p95 / most", in_milliseconds(took)),
        *((("a failure", failures[0]),) if failures else ()),
    ]


def own_process(server: ServerProcess) -> psutil.Process:
    """The process that serves."""
    processes = [psutil.Process(pid) for pid, _ in server.cpu_seconds_by_process()]
    return max(processes, key=lambda process: process.memory_info().rss)


def megabytes(process: psutil.Process) -> str:
    return f"{process.memory_info().rss / 1e6:.0f}"


def in_milliseconds(took: list[float]) -> str:
    """A summary of sorted times."""
    return " / ".join(f"{1000 * took[min(int(len(took) * part), len(took) - 1)]:.0f}" for part in (0.5, 0.95, 1.0))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=10_000)
    parser.add_argument("--resident", type=int, default=100, help="models that are loaded at once")
    parser.add_argument("--seconds", type=float, default=120.0, help="of load by Zipf's law")
    parser.add_argument("--shared-workers", type=int, metavar="N", help="have all models loaded, in N processes")
    parser.add_argument("--write", metavar="NAME", help="also write benchmarks/results/NAME.md")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
