"""Quantises the digits' network, the shape detector and the text encoder by each method, and compares the files.

    make pytorch
    python clients/examples/quantisation_table.py --out build/quantisation

Prints and draws size, accuracy and speed. Engine eager serves each file, and each is measured without a server on the
same inputs: by PyTorch itself, compiled by Inductor, and as ONNX by ONNX Runtime.
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
import torch.ao.quantization.fx._decomposed  # Registers the operators of quantised programs.
from demo_server import running_server
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from quantisation_digits import held_out_data
from quantisation_shapes import as_inputs, held_out_pictures, precision
from quantisation_text import held_out_windows, perplexity
from torch.utils import _pytree as pytree

from rocserve_client import Client

HERE = Path(__file__).parent
ROWS = 32
"""Rows per batch."""
START_SECONDS = 1800.0
"""Each of sixteen workers imports PyTorch."""
SECONDS = 0.5
"""CPU time for each measurement of speed."""
METHODS = {"digits": ("dynamic", "static", "qat"), "shapes": ("static", "qat"), "text": ("dynamic", "static")}
ENGINES = ("eager", "inductor", "onnxruntime")
COLUMNS = ("network", "in", "KiB", "judged by", "served", *(f"{engine}, CPU ms a batch" for engine in ENGINES))
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}

Array = np.ndarray[Any, Any]
Outputs = list[Array]
Run = Callable[[Array], Outputs]


@dataclass(frozen=True, slots=True)
class Task:
    """A network and the measure of its accuracy."""

    inputs: Array
    measure: str
    judge: Callable[[Outputs], float]


@dataclass(frozen=True, slots=True)
class Row:
    network: str
    way: str
    """fp32, bf16, fp16, or a method of quantisation."""
    kilobytes: float
    measure: str
    served: float
    bare: Mapping[str, float]
    """By engine, as `milliseconds`."""
    milliseconds: Mapping[str, float]


def tasks() -> dict[str, Task]:
    images, labels = held_out_data()
    windows = held_out_windows()
    pictures = held_out_pictures()
    return {
        "digits": Task(images, "accuracy", lambda outputs: float(np.mean(outputs[0].argmax(1) == labels))),
        "shapes": Task(as_inputs(pictures), "mAP@0.5", lambda outputs: precision(outputs, pictures)),
        "text": Task(windows[:, :-1], "perplexity", lambda outputs: perplexity(outputs[0], windows[:, 1:])),
    }


def make_files(folder: Path, networks: Sequence[str]) -> None:
    """Write the missing files."""
    for network in networks:
        if not (folder / f"{network}.pt2").exists():
            _command(str(HERE / f"quantisation_{network}.py"), f"--out={folder}")
        for method in METHODS[network]:
            train = [f"--train={HERE / f'quantisation_{network}.py'}"] if method == "qat" else []
            out = folder / f"{network}_{method}.pt2"
            if not out.exists():
                data = [f"--data={folder / network}.npy", f"--out={out}"]
                _command(
                    "-m", "rocserve.cli", "quantise", f"{folder / network}.pt2", f"--method={method}", *data, *train
                )


def _command(*words: str) -> None:
    subprocess.run([sys.executable, *words], check=True)


def file_of(folder: Path, network: str, way: str) -> Path:
    return folder / (f"{network}.pt2" if way == "fp32" or way in HALVES else f"{network}_{way}.pt2")


def eager(file: Path, way: str) -> Run:
    module = torch.export.load(file).module()
    return outputs_as_floats(in_half(module, HALVES[way]) if way in HALVES else module)


def inductor(file: Path, way: str) -> Run:
    package = file.with_name(f"{file.stem}_inductor.pt2")
    if not package.exists():
        torch._inductor.aoti_compile_and_package(torch.export.load(file), package_path=str(package))
    compiled = torch._inductor.aoti_load_package(str(package))
    return outputs_as_floats(
        lambda values: compiled(values.contiguous())
    )  # The program does not check the strides of its inputs.


def in_half(module: Any, dtype: torch.dtype) -> Callable[[Any], Any]:
    """Return the module in bf16 or fp16, still with FP32 inputs."""
    half = module.to(dtype)
    return lambda values: half(values.to(dtype) if values.is_floating_point() else values)


def outputs_as_floats(module: Callable[[Any], Any]) -> Run:
    def run(batch: Array) -> Outputs:
        with torch.inference_mode():
            return [output.float().numpy() for output in pytree.tree_leaves(module(torch.from_numpy(batch)))]

    return run


def onnx_runtime(file: Path, way: str) -> Run:
    import onnxruntime

    from rocserve.backends.pytorch.onnx_file import write_onnx

    path = file.with_suffix(".onnx")
    if not path.exists():
        write_onnx(torch.export.load(file), path, ["input"], [])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda batch: list(session.run(None, {"input": batch}))


def in_batches(run: Run, inputs: Array) -> Outputs:
    batches = [run(inputs[start : start + ROWS]) for start in range(0, len(inputs), ROWS)]
    return [np.concatenate(column) for column in zip(*batches, strict=True)]


def milliseconds(run: Run, batch: Array) -> float:
    """Return the median CPU time of a batch, so that other work of the machine does not count."""
    for _ in range(5):
        run(batch)
    taken: list[float] = []
    while sum(taken) < SECONDS:
        started = time.process_time()
        run(batch)
        taken.append(time.process_time() - started)
    return float(np.median(taken)) * 1e3


def served_scores(folder: Path, networks: Sequence[str], task_of: Mapping[str, Task]) -> dict[tuple[str, str], Outputs]:
    """Return the scores, by network and way, of the answers of a server with these files only."""
    repository = folder / "repository"
    names = {(network, way): f"{network}_{way}" for network in networks for way in ("fp32", *HALVES, *METHODS[network])}
    for (network, way), name in names.items():
        version = repository / name / "1"
        version.mkdir(parents=True, exist_ok=True)
        (version / "model.pt2").unlink(missing_ok=True)
        os.link(file_of(folder, network, way), version / "model.pt2")
        if way in HALVES:
            text = f'parameters {{ key: "precision" value {{ string_value: "{way}" }} }}\n'
            (repository / name / "config.pbtxt").write_text(f'backend: "pytorch"\n{text}')
    server = running_server(repository, list(names.values()), folder / "server.log", START_SECONDS)
    with server as address, Client(address) as client:

        def ask(name: str) -> Run:
            metadata = client.model_metadata(name)

            def run(batch: Array) -> Outputs:
                answer = client.infer(name, {metadata.inputs[0].name: batch})
                return [np.asarray(answer[output.name]) for output in metadata.outputs]

            return run

        return {key: in_batches(ask(name), task_of[key[0]].inputs) for key, name in names.items()}


def measured(folder: Path, networks: Sequence[str]) -> list[Row]:
    rows = []
    task_of = tasks()
    served = served_scores(folder, networks, task_of)
    for (network, way), answers in served.items():
        task, file = task_of[network], file_of(folder, network, way)
        made: dict[str, Callable[[Path, str], Run]] = {"eager": eager}
        if way not in HALVES:
            made["onnxruntime"] = onnx_runtime
        if way not in (*HALVES, "qat"):  # A network of qat has the operators of static.
            made["inductor"] = inductor
        runs = {engine: make(file, way) for engine, make in made.items()}
        bare = {engine: task.judge(in_batches(run, task.inputs)) for engine, run in runs.items()}
        speeds = {engine: milliseconds(run, task.inputs[:ROWS]) for engine, run in runs.items()}
        size = file.stat().st_size / 1024
        rows.append(Row(network, way, size, task.measure, task.judge(answers), bare, speeds))
        print(rows[-1], flush=True)
    return rows


def markdown(rows: Sequence[Row]) -> str:
    lines = [COLUMNS, ("---",) * len(COLUMNS)]
    for row in rows:
        cells = {engine: f"{ms:.2f} ({figure(row, row.bare[engine])})" for engine, ms in row.milliseconds.items()}
        speeds = [cells.get(engine, "") for engine in ENGINES]
        lines.append(
            (
                row.network,
                row.way if row.way not in METHODS[row.network] else f"int8, {row.way}",
                f"{row.kilobytes:.0f}",
                row.measure,
                figure(row, row.served),
                *speeds,
            )
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def figure(row: Row, value: float) -> str:
    return f"{value:.2%}" if row.measure == "accuracy" else f"{value:.4f}"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw milliseconds per batch by way, one picture per network."""
    networks = tuple(dict.fromkeys(row.network for row in rows))
    figure = Figure(figsize=(13.0, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, network in zip(figure.subplots(1, len(networks), squeeze=False)[0], networks, strict=True):
        own = [row for row in rows if row.network == network]
        for place, engine in enumerate(ENGINES):
            bars = [(spot, row.milliseconds[engine]) for spot, row in enumerate(own) if engine in row.milliseconds]
            if bars:
                axes.bar([spot + 0.28 * (place - 1) for spot, _ in bars], [ms for _, ms in bars], 0.27, label=engine)
        axes.set_xticks(range(len(own)), [f"{row.way}\n{row.served:.4g}\n{row.kilobytes:.0f} KiB" for row in own])
        axes.tick_params(labelsize=7)
        axes.set_title(f"{network}: CPU ms a batch of {ROWS}; below: {own[0].measure}, size", fontsize=9)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=140)


def main() -> None:
    parser = argparse.ArgumentParser(description="Quantise three networks each way, and measure them.")
    parser.add_argument("--out", type=Path, required=True, help="the folder for all files; what is in it is used")
    parser.add_argument("--networks", default=",".join(METHODS), help="those that are measured")
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
