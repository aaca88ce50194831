"""Quantise the digits' network and the text encoder each way; print and draw what it costs and what it brings.

    make pytorch
    python clients/examples/quantisation_table.py --out build/quantisation

What is served is what is measured bare, on the same inputs: PyTorch's file, by engine eager.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.ao.quantization.fx._decomposed  # The operators of quantised programs.
from demo_server import running_server
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from quantisation_digits import held_out_data
from quantisation_text import held_out_windows, perplexity

from rocserve_client import Client

HERE = Path(__file__).parent
ROWS = 32
"""Of a batch."""
START_SECONDS = 300.0
"""Each of nine workers imports PyTorch."""
SECONDS = 0.5
"""Of CPU time; each speed is measured for so long."""
WAYS = {"digits": ("dynamic", "static", "qat"), "text": ("dynamic", "static")}
ENGINES = ("eager", "onnxruntime")
COLUMNS = ("network", "in", "KiB", "judged by", "served", *(f"{engine}, CPU ms a batch" for engine in ENGINES))
HALF = "bf16"

Array = np.ndarray[Any, Any]
Run = Callable[[Array], Array]


@dataclass(frozen=True, slots=True)
class Task:
    """What a network is judged by."""

    inputs: Array
    measure: str
    judge: Callable[[Array], float]


@dataclass(frozen=True, slots=True)
class Row:
    network: str
    precision: str
    kilobytes: float
    measure: str
    served: float
    bare: Mapping[str, float]
    """By engine, as the milliseconds are."""
    milliseconds: Mapping[str, float]


def tasks() -> dict[str, Task]:
    images, labels = held_out_data()
    windows = held_out_windows()
    return {
        "digits": Task(images, "accuracy", lambda scores: float(np.mean(scores.argmax(1) == labels))),
        "text": Task(windows[:, :-1], "perplexity", lambda scores: perplexity(scores, windows[:, 1:])),
    }


def make_files(folder: Path, networks: Sequence[str]) -> None:
    """What is there already stays."""
    for network, ways in ((network, WAYS[network]) for network in networks):
        if not (folder / f"{network}.pt2").exists():
            _command(str(HERE / f"quantisation_{network}.py"), f"--out={folder}")
        for way in ways:
            train = [f"--train={HERE / 'quantisation_digits.py'}"] if way == "qat" else []
            out = folder / f"{network}_{way}.pt2"
            if not out.exists():
                data = [f"--data={folder / network}.npy", f"--out={out}"]
                _command("-m", "rocserve.cli", "quantise", f"{folder / network}.pt2", f"--method={way}", *data, *train)


def _command(*words: str) -> None:
    subprocess.run([sys.executable, *words], check=True)


def file_of(folder: Path, network: str, precision: str) -> Path:
    return folder / (f"{network}.pt2" if precision in ("fp32", HALF) else f"{network}_{precision}.pt2")


def eager(file: Path, precision: str) -> Run:
    module = torch.export.load(file).module()
    if precision == HALF:
        module = module.to(torch.bfloat16)

    def run(batch: Array) -> Array:
        values = torch.from_numpy(batch)
        if precision == HALF and values.is_floating_point():
            values = values.to(torch.bfloat16)
        with torch.inference_mode():
            scores: Array = module(values).float().numpy()
        return scores

    return run


def onnx_runtime(file: Path, folder: Path) -> Run:
    import onnxruntime

    from rocserve.backends.pytorch.onnx_file import write_onnx

    path = folder / f"{file.stem}.onnx"
    write_onnx(torch.export.load(file), path, ["input"], ["scores"])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda batch: session.run(None, {"input": batch})[0]


def in_batches(run: Run, inputs: Array) -> Array:
    return np.concatenate([run(inputs[start : start + ROWS]) for start in range(0, len(inputs), ROWS)])


def milliseconds(run: Run, batch: Array) -> float:
    """Of CPU time, the median of a batch: what else the machine does then is no part of it."""
    for _ in range(5):
        run(batch)
    taken: list[float] = []
    while sum(taken) < SECONDS:
        started = time.process_time()
        run(batch)
        taken.append(time.process_time() - started)
    return float(np.median(taken)) * 1e3


def served_scores(folder: Path, networks: Sequence[str], task_of: Mapping[str, Task]) -> dict[tuple[str, str], Array]:
    """By network and precision: what a server answers that has just these files."""
    repository = folder / "repository"
    names = {(network, way): f"{network}_{way}" for network in networks for way in ("fp32", HALF, *WAYS[network])}
    for (network, way), name in names.items():
        version = repository / name / "1"
        version.mkdir(parents=True, exist_ok=True)
        (version / "model.pt2").unlink(missing_ok=True)
        os.link(file_of(folder, network, way), version / "model.pt2")
        if way == HALF:
            text = f'parameters {{ key: "precision" value {{ string_value: "{HALF}" }} }}\n'
            (repository / name / "config.pbtxt").write_text(f'backend: "pytorch"\n{text}')
    server = running_server(repository, list(names.values()), folder / "server.log", START_SECONDS)
    with server as address, Client(address) as client:

        def ask(name: str) -> Run:
            field = client.model_metadata(name).inputs[0].name
            return lambda batch: np.asarray(client.infer(name, {field: batch})["OUTPUT__0"])

        return {key: in_batches(ask(name), task_of[key[0]].inputs) for key, name in names.items()}


def measured(folder: Path, networks: Sequence[str]) -> list[Row]:
    rows = []
    task_of = tasks()
    served = served_scores(folder, networks, task_of)
    for (network, precision), answers in served.items():
        task, file = task_of[network], file_of(folder, network, precision)
        runs: dict[str, Run] = {"eager": eager(file, precision)}
        if precision != HALF:
            runs["onnxruntime"] = onnx_runtime(file, folder)
        bare = {engine: task.judge(in_batches(run, task.inputs)) for engine, run in runs.items()}
        speeds = {engine: milliseconds(run, task.inputs[:ROWS]) for engine, run in runs.items()}
        size = file.stat().st_size / 1024
        rows.append(Row(network, precision, size, task.measure, task.judge(answers), bare, speeds))
        print(rows[-1], flush=True)
    return rows


def markdown(rows: Sequence[Row]) -> str:
    lines = [COLUMNS, ("---",) * len(COLUMNS)]
    for row in rows:
        cells = {engine: f"{ms:.2f} ({figure(row, row.bare[engine])})" for engine, ms in row.milliseconds.items()}
        speeds = [cells.get(engine, "") for engine in ENGINES]
        lines.append(
            (row.network, row.precision, f"{row.kilobytes:.0f}", row.measure, figure(row, row.served), *speeds)
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def figure(row: Row, value: float) -> str:
    return f"{value:.2%}" if row.measure == "accuracy" else f"{value:.4f}"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Milliseconds a batch over what is right, a picture a network."""
    networks = tuple(dict.fromkeys(row.network for row in rows))
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, network in zip(figure.subplots(1, len(networks), squeeze=False)[0], networks, strict=True):
        own = [row for row in rows if row.network == network]
        for place, engine in enumerate(ENGINES):
            there = [(spot, row.milliseconds[engine]) for spot, row in enumerate(own) if engine in row.milliseconds]
            if there:
                axes.bar([spot + 0.4 * (place - 0.5) for spot, _ in there], [ms for _, ms in there], 0.38, label=engine)
        axes.set_xticks(range(len(own)), [f"{row.precision}\n{row.served:.4g}\n{row.kilobytes:.0f} KiB" for row in own])
        axes.set_title(f"{network}: CPU ms a batch of {ROWS}; below: {own[0].measure}, size", fontsize=9)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=140)


def main() -> None:
    parser = argparse.ArgumentParser(description="Quantise two networks each way, and measure them.")
    parser.add_argument("--out", type=Path, required=True, help="the folder for all files; what is in it is used")
    parser.add_argument("--networks", default=",".join(WAYS), help="those that are measured")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    networks = options.networks.split(",")
    make_files(options.out, networks)
    rows = measured(options.out, networks)
    (options.out / "table.md").write_text(markdown(rows) + "\n")
    draw(rows, options.out / "table.png")
    print(markdown(rows))
    print(json.dumps({"threads": torch.get_num_threads(), "torch": torch.__version__}))


if __name__ == "__main__":
    main()
