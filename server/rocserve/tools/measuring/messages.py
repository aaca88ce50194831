"""Orders to a measuring process and its answers, a line of JSON each; the inputs and outputs of runs, as files."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rocserve.core.model_config import InstanceKind, ModelConfig
from rocserve.core.requests import Signature
from rocserve.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class WorkerEngine:
    """A model in an engine as a worker of the server would have it."""

    title: str
    """What the engine is called: "ONNX Runtime"."""
    library: str
    """The Python module that has its version; "" = MIGraphX, whose version the loaded model knows."""
    module: str
    """EngineSpec's."""
    model_folder: str
    model_file: str
    config: ModelConfig
    instance_kind: InstanceKind
    device: int | None
    instance_count: int
    """How many are to run it at once."""
    settings: EngineSettings


@dataclass(frozen=True, slots=True)
class TorchModule:
    """A model in PyTorch: a TorchScript or exported program's file, or an ONNX file that is converted."""

    torch_file: str
    on_gpu: bool


Engine = WorkerEngine | TorchModule


@dataclass(frozen=True, slots=True)
class MeasuredInput:
    name: str
    datatype: str
    """numpy's name, e.g. float32; bf16 and fp8 go as the unsigned integers of their bits."""
    shape: tuple[int, ...]
    """Batch dimension included."""


@dataclass(frozen=True, slots=True)
class Measure:
    """Run until both `repeats` runs are done and `seconds` have passed."""

    inputs: tuple[MeasuredInput, ...]
    data_file: str = ""
    """An .npz with the inputs; "" = random ones, the same for the same names and shapes."""
    repeats: int = 1
    seconds: float = 0.0
    begin_at: float = 0.0
    """The time (CLOCK_MONOTONIC, seconds) that all begin at who measure together; 0 = at once."""
    threads: int = 1
    """How many run it at once."""
    outputs_file: str = ""
    """Where the outputs of one more run go (.npz: output_0, output_1 ...); "" = nowhere."""


@dataclass(frozen=True, slots=True)
class Opened:
    description: str
    """What runs it: "MIGraphX 2.14.0 (c_api)", "ONNX Runtime 1.31.1 (CPUExecutionProvider)"."""
    signature: Signature | None = None
    """Of a WorkerEngine."""


@dataclass(frozen=True, slots=True)
class Measured:
    latencies: tuple[float, ...]
    """Seconds, of each run, of all threads."""
    elapsed: float
    """From the beginning to the end of the last run."""


@dataclass(frozen=True, slots=True)
class Order:
    """One of the two, a line to the process."""

    engine: WorkerEngine | TorchModule | None = None
    """To be opened."""
    measure: Measure | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """One of the three, a line back."""

    opened: Opened | None = None
    measured: Measured | None = None
    failure: str = ""


Array = np.ndarray[Any, Any]


def random_inputs(inputs: Sequence[MeasuredInput], seed: int = 0) -> dict[str, Array]:
    """The same for the same names, shapes and seed: floats from 0 to 1 (images look like this, logarithms and roots
    exist), integers 0 or 1 (they may be indices, masks or counts), booleans."""
    made: dict[str, Array] = {}
    for one in inputs:
        generator = np.random.default_rng((seed, zlib.crc32(one.name.encode())))
        datatype = np.dtype(one.datatype)
        if datatype.kind == "f":
            made[one.name] = generator.random(one.shape, dtype=np.float32).astype(datatype)
        else:
            made[one.name] = generator.integers(0, 2, one.shape).astype(datatype)
    return made


def inputs_of(inputs: Sequence[MeasuredInput], data_file: str) -> Mapping[str, Array]:
    """Those of an .npz file, which lacks the inputs on which no output depends; "" = random ones."""
    if not data_file:
        return random_inputs(inputs)
    with np.load(data_file, allow_pickle=False) as file:
        return {one.name: np.ascontiguousarray(file[one.name]) for one in inputs if one.name in file}


def save_inputs(path: Path, inputs: Mapping[str, Array]) -> None:
    named: dict[str, Any] = dict(inputs)
    np.savez(path, **named)


def save_outputs(path: str, outputs: Sequence[Array]) -> None:
    """As output_0, output_1, ... in the model's order; those that are text are left out."""
    numbers = [output for output in map(np.asarray, outputs) if output.dtype.kind in "biuf"]
    named: dict[str, Any] = {f"output_{number}": output for number, output in enumerate(numbers)}
    np.savez(path, **named)


def read_outputs(path: str) -> list[Array]:
    with np.load(path, allow_pickle=False) as file:
        return [file[f"output_{number}"] for number in range(len(file.files))]
