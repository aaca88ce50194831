"""A measuring process as its parent has it: takes orders, a line of JSON each, answers, and ends with all that it
started; the inputs and outputs of runs, as files; latencies taken in turns."""

from __future__ import annotations

import math
import os
import select
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

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
    """Where the outputs of one more run go (.npz, in the model's order, without texts); "" = nowhere."""


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
    """A line of JSON to the process: an engine to be opened, or what is to be run in it."""

    asked: Engine | Measure


@dataclass(frozen=True, slots=True)
class Answer:
    """A line back; a text says why it failed."""

    given: Opened | Measured | str


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


def read_outputs(path: str) -> list[Array]:
    with np.load(path, allow_pickle=False) as file:
        return list(file.values())


_CHILD = "rocserve.tools.measuring.child"
_LONGEST_POLL_SECONDS = 3600.0
"""poll(2) takes no more than some weeks."""


class MeasuringProcess:
    """A context: the process is gone when it is left. Orders are answered one after the other."""

    def __init__(
        self, title: str, python: Sequence[str], environment: Mapping[str, str], *, timeout_seconds: float = 0.0
    ) -> None:
        """`title`: what errors begin with. `python`: the words that start the interpreter. `environment`: set on top of
        this process's. `timeout_seconds`: up to its last answer, as --timeout-secs has it; 0 = no limit. Raises:
        ServeError: it cannot be started."""
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
        """Load the model. Raises: ServeError: it cannot be had or cannot load the model, with the reason."""
        self.send(engine)
        opened = self.answer()
        assert isinstance(opened, Opened)
        return opened

    def measure(self, order: Measure) -> Measured:
        """Raises: ServeError: a run failed."""
        self.send(order)
        measured = self.answer()
        assert isinstance(measured, Measured)
        return measured

    def send(self, asked: Engine | Measure) -> None:
        try:
            self._process.send(to_json(Order(asked)))
        except BrokenPipeError:
            raise unavailable(f"{self.title}: {self._end()}") from None

    def answer(self) -> Opened | Measured:
        """The next one. Raises: ServeError: it is that something failed, or there will be none."""
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
        # What engines write is in memory until it is taken, and they may write much.
        self._process.output.take_lines()
        given = from_json(Answer, self._lines.pop(0)).given
        if isinstance(given, str):
            raise unavailable(f"{self.title}: {given}")
        return given

    def _end(self) -> str:
        status = self._process.wait()
        self._process.output.take_lines(ended=True)
        return with_hint(describe_end(status, self._process.output.last_lines, 0, "the process"))


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """Milliseconds, by the names that tables and JSON have for them."""

    runs: int
    min: float
    mean: float
    p50: float
    p95: float
    p99: float
    std: float
    """Standard deviation over all that was measured."""


def summarise(seconds: Sequence[float]) -> LatencySummary:
    values = np.asarray(seconds, dtype=np.float64) * 1e3
    figures = (values.min(), values.mean(), *np.percentile(values, (50, 95, 99)), values.std())
    return LatencySummary(len(seconds), *map(float, figures))


_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Timing:
    """How long to measure."""

    warm_up: int = flag(3, AMOUNT, "runs before those that are timed")
    repeats: int = flag(10, POSITIVE, "timed runs, at least")
    seconds: float = flag(2.0, number("S", 0, float), "how long each setting is timed, at least")


def time_interleaved(
    processes: Mapping[str, MeasuringProcess], orders: Mapping[str, Measure], timing: Timing
) -> dict[str, list[float]]:
    """The latencies, in seconds, of each process's order; who begins changes from round to round. Raises: ServeError: a
    run failed."""
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
