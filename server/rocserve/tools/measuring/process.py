"""Runs a measuring process from its parent: orders and answers are lines of JSON, inputs and outputs are files."""

from __future__ import annotations

import math
import os
import select
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import numpy as np

from rocserve.core.errors import unavailable
from rocserve.core.model_config import InstanceKind, ModelConfig
from rocserve.core.plain import from_json, to_json
from rocserve.core.requests import Signature
from rocserve.jobs.hints import with_hint
from rocserve.jobs.runner import JobProcess, describe_end
from rocserve.settings import EngineSettings
from rocserve.settings.flag import AMOUNT, POSITIVE, flag, number

Array = np.ndarray[Any, Any]
Result = TypeVar("Result", "Opened", "Measured")


@dataclass(frozen=True, slots=True)
class WorkerEngine:
    """Describes a model in an engine, as a worker of the server runs it."""

    title: str
    """The engine's name for users: "ONNX Runtime"."""
    library: str
    """Python module that knows the engine's version; "" = MIGraphX, whose version the loaded model reports."""
    module: str
    model_folder: str
    model_file: str
    config: ModelConfig
    instance_kind: InstanceKind
    device: int | None
    instance_count: int
    settings: EngineSettings


@dataclass(frozen=True, slots=True)
class TorchModule:
    """Describes a model in PyTorch: a file of TorchScript or of torch.export, or an ONNX file that is converted."""

    torch_file: str
    on_gpu: bool


Engine = WorkerEngine | TorchModule


@dataclass(frozen=True, slots=True)
class MeasuredInput:
    name: str
    datatype: str
    """numpy's name, such as float32. bf16 and fp8 are passed as unsigned integers with the same bits."""
    shape: tuple[int, ...]
    """Shape with the batch dimension."""


@dataclass(frozen=True, slots=True)
class Measure:
    """Orders runs: each thread runs until its `repeats` runs are done and `seconds` have passed."""

    inputs: tuple[MeasuredInput, ...]
    data_file: str = ""
    """.npz file with the inputs; "" = random inputs, the same for the same names and shapes."""
    repeats: int = 1
    seconds: float = 0.0
    begin_at: float = 0.0
    """CLOCK_MONOTONIC seconds at which all processes that are measured together start; 0 = immediately."""
    threads: int = 1
    outputs_file: str = ""
    """.npz file for the outputs of one additional run, in the model's order, without BYTES outputs; "" = no file."""


@dataclass(frozen=True, slots=True)
class Opened:
    description: str
    """Engine, version and place: "MIGraphX 2.14.0 (c_api)", "ONNX Runtime 1.31.1 (CPUExecutionProvider)"."""
    signature: Signature | None = None
    """The model's signature; None for a TorchModule."""


@dataclass(frozen=True, slots=True)
class Measured:
    latencies: tuple[float, ...]
    """Seconds of each run, of all threads."""
    elapsed: float
    """Seconds from the start to the end of the last run."""


@dataclass(frozen=True, slots=True)
class Order:
    """Carries an engine to open, or a measurement to run, as a line of JSON to the process."""

    action: Engine | Measure


@dataclass(frozen=True, slots=True)
class Answer:
    """Carries a result, or an error text, as a line of JSON from the process."""

    result: Opened | Measured | str


def random_inputs(inputs: Sequence[MeasuredInput], seed: int = 0) -> dict[str, Array]:
    """Return the same inputs for the same names, shapes and seed: floats in 0..1 (like images; logarithms and roots
    exist), integers 0 or 1 (they may be indices, masks or counts)."""
    made: dict[str, Array] = {}
    for one in inputs:
        generator = np.random.default_rng((seed, zlib.crc32(one.name.encode())))
        datatype = np.dtype(one.datatype)
        if datatype.kind == "f":
            made[one.name] = generator.random(one.shape, dtype=np.float32).astype(datatype)
        else:
            made[one.name] = generator.integers(0, 2, one.shape).astype(datatype)
    return made


def read_outputs(path: str) -> list[Array]:
    with np.load(path, allow_pickle=False) as file:
        return list(file.values())


_CHILD = "rocserve.tools.measuring.child"
_LONGEST_POLL_SECONDS = 3600.0
"""poll(2) limits its timeout to some weeks."""


class MeasuringProcess:
    """Runs a process that measures one model, in order after order. Leaving the context ends it and its children."""

    def __init__(
        self, title: str, python: Sequence[str], environment: Mapping[str, str], *, timeout_seconds: float = 0.0
    ) -> None:
        """Start the process. `title`: prefix of error texts. `python`: the interpreter's command line. `environment`:
        additional variables. `timeout_seconds`: limit until the last answer, the flag --timeout-secs; 0 = none. Raises
        ServeError if the process cannot be started."""
        self.title = title
        self._timeout_seconds = timeout_seconds
        self._deadline = time.monotonic() + (timeout_seconds or math.inf)
        self._lines: list[bytes] = []
        try:
            self._process = JobProcess([*python, "-P", "-m", _CHILD], {**os.environ, **environment})
        except OSError as error:
            raise unavailable(f"{title}: no process could be started: {error}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.__exit__()

    def open(self, engine: Engine) -> Opened:
        """Load the model. Raises ServeError with the reason if it cannot be loaded."""
        self.send(engine)
        return self.answer(Opened)

    def measure(self, order: Measure) -> Measured:
        self.send(order)
        return self.answer(Measured)

    def send(self, action: Engine | Measure) -> None:
        try:
            self._process.send(to_json(Order(action)))
        except BrokenPipeError:
            raise unavailable(f"{self.title}: {self._end()}") from None

    def answer(self, kind: type[Result]) -> Result:
        """Return the next answer. Raises ServeError if it is an error, or if the process ended or timed out."""
        poll = select.poll()
        poll.register(self._process.replies, select.POLLIN)
        while not self._lines:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise unavailable(
                    f"{self.title} took longer than --timeout-secs ({self._timeout_seconds:g} s) and was stopped; raise"
                    " --timeout-secs (0 = no limit)"
                )
            if poll.poll(min(left, _LONGEST_POLL_SECONDS) * 1000):
                lines = self._process.take_replies()
                if lines is None:
                    raise unavailable(f"{self.title}: {self._end()}")
                self._lines += lines
        # The engine's log lines stay in memory until they are taken, and there may be many.
        self._process.output.take_lines()
        result = from_json(Answer, self._lines.pop(0)).result
        if isinstance(result, str):
            raise unavailable(f"{self.title}: {result}")
        assert isinstance(result, kind)
        return result

    def _end(self) -> str:
        status = self._process.wait()
        self._process.output.take_lines(ended=True)
        return with_hint(describe_end(status, self._process.output.last_lines, 0, "the process"))


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """Holds latency figures in milliseconds, under their names in tables and JSON."""

    runs: int
    min: float
    mean: float
    p50: float
    p95: float
    p99: float
    std: float


def summarise(seconds: Sequence[float]) -> LatencySummary:
    values = np.asarray(seconds, dtype=np.float64) * 1e3
    figures = (values.min(), values.mean(), *np.percentile(values, (50, 95, 99)), values.std())
    return LatencySummary(len(seconds), *map(float, figures))


_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Timing:
    warm_up: int = flag(3, AMOUNT, "runs before the timed ones")
    repeats: int = flag(10, POSITIVE, "least number of timed runs")
    seconds: float = flag(2.0, number("S", 0, float), "least time for which each setting is timed")


def time_interleaved(
    processes: Mapping[str, MeasuringProcess], orders: Mapping[str, Measure], timing: Timing
) -> dict[str, list[float]]:
    """Run the orders in rounds, each second round from the last process to the first, and return the latencies in
    seconds. Raises ServeError if a run failed."""
    for name, order in orders.items():
        if timing.warm_up:
            processes[name].measure(replace(order, repeats=timing.warm_up, seconds=0.0))
    repeats, seconds = math.ceil(timing.repeats / _ROUNDS), timing.seconds / _ROUNDS
    latencies: dict[str, list[float]] = {name: [] for name in orders}
    for place in range(min(_ROUNDS, timing.repeats)):
        for name in list(orders)[:: -1 if place % 2 else 1]:
            order = replace(orders[name], repeats=repeats, seconds=seconds, outputs_file="")
            latencies[name] += processes[name].measure(order).latencies
    return latencies
