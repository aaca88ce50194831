"""What a backend is: how it registers, and what its engine does in a worker.

A backend is a folder of this package. Its `__init__.py` defines `BACKEND: BackendSpec` and imports no engine; the
server reads only that. An engine's module is imported in a worker, where its `load` makes a LoadedModel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rocserve.core.errors import ServeError
from rocserve.core.model_config import InstanceKind, ModelConfig
from rocserve.core.requests import Signature
from rocserve.core.tensors import Tensor
from rocserve.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One way to run a backend's models."""

    name: str
    """What the parameter `engine` calls it, e.g. "onnxruntime"."""
    module: str
    """The module with `def load(model: ModelSource) -> LoadedModel`, imported in the worker; of a backend that answers
    requests `def load(model: RequestModelSource) -> RequestModel`. What it raises, a ServeError or any exception,
    becomes the reason in the repository index."""
    thread_safe: bool
    """Whether one loaded model may execute on several threads at once; else each instance is a worker of its own."""
    forks_from_zygote: bool
    """Whether the zygote, which has imported the CPU engines, may fork the worker; else it is started by exec."""
    shares_process: bool = False
    """Whether its models may be in one process with others."""
    preload: tuple[str, ...] = ()
    """Modules that the zygote imports ahead for this engine, where they are installed."""
    gpu_module: str = ""
    """The module that takes its models to a GPU where it is installed, one worker an instance; "" = the CPU only."""
    gpu_files: tuple[str, ...] = ()
    """Files in that module's folder, of which one must be there for it; empty = the module alone does it."""
    compiles_ahead: bool = False
    """Whether its workers keep what they compile in the cache."""
    takes_kind_model: bool = False
    """Whether a worker of KIND_MODEL has all GPUs, and its file says what is where; else KIND_MODEL is as KIND_AUTO."""
    needs_migraphx: bool = False
    """Whether its workers load MIGraphX: they are started as its installation wants (migraphx/installation.py)."""


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """Which engine runs a model, and why."""

    engine: EngineSpec
    reason: str
    """For the log and the model's metadata: goes on after "engine onnxruntime: "."""
    fallback: EngineChoice | None = None
    """Takes its place, said loudly, when it cannot load the model: another engine, or the same without GPUs."""
    auto_takes_gpus: bool = False
    """Whether instances of KIND_AUTO go to the GPUs where there are any; else they are on the CPU."""


class Machine(Protocol):
    """What the server knows of the machine without loading an engine."""

    @property
    def gpus(self) -> Sequence[int]:
        """The AMD GPUs that may be used, by the numbers that HIP_VISIBLE_DEVICES takes."""

    @property
    def migraphx(self) -> str:
        """Why MIGraphX cannot be used here; "" where it can."""

    def is_installed(self, module: str, files: tuple[str, ...] = ()) -> bool:
        """Whether a Python module is, with one of these files in its folder where any are named."""

    def architecture(self, gpu: int) -> str:
        """That of a GPU by its number, e.g. "gfx90a"; "" where it is not known."""

    def cores(self, policy: str) -> Sequence[int]:
        """The CPU cores that a host policy names; empty = any. Raises: ServeError: the policy cannot be had here."""

    def most_instances(self, gpus: int) -> int:
        """How many a model may have on that number of GPUs; on the CPU for 0."""

    def loader(self, engine: EngineSpec) -> tuple[str, ...]:
        """The words that stand before the interpreter in the command of the engine's workers. Raises: ServeError:
        UNAVAILABLE, what the engine needs to start is not there."""


@dataclass(frozen=True, slots=True)
class BackendSpec:
    name: str
    """The canonical name, e.g. "onnx"."""
    platforms: tuple[str, ...]
    """The values of config.pbtxt's `platform` and `backend` that name it; the first is what metadata reports."""
    engines: tuple[EngineSpec, ...]
    """What may run its models; the first unless `choose_engine` says otherwise."""
    model_filenames: tuple[str, ...]
    """Files that a version folder may hold; the first that exists is the model ("*.json": the one such file)."""
    file_endings: tuple[str, ...] = ()
    """By which a file of any name is known as one of its models, in lower case."""
    default_max_batch_size: int = 64
    """What max_batch_size becomes when the config leaves it out and the model can batch, unless it takes less."""
    answers_requests: bool = False
    """Whether its models see each request for itself (see `request_model.py`), not batches of tensors."""
    takes_ragged_batches: bool = False
    """Whether requests of different shapes may share a batch (allow_ragged_batch, batch_input, batch_output)."""
    takes_operators: bool = False
    """Whether its engine can be given libraries of custom operators (model_operations)."""
    models_are_data: bool = False
    """Whether no model file of its kind brings code. Only such a backend is a load request's to choose, and such files
    a request may bring."""
    marks_of_programs: tuple[bytes, ...] = ()
    """Bytes that are found in each of those files that brings compiled code after all."""
    request_parameters: frozenset[str] = frozenset()
    """The parameters, a model's own and its execution accelerators', that a load request may set: none of them names
    code, a program, or a file outside of the model's folder. All others are the repository's."""
    choose_engine: Callable[[ModelConfig, Machine], EngineChoice] | None = None
    """Raises: ServeError: the engine that the configuration asks for cannot be had here."""

    def engine_for(self, config: ModelConfig, machine: Machine) -> EngineChoice:
        """Which engine runs a model of this configuration here. Raises: ServeError, as `choose_engine`."""
        if self.choose_engine is not None:
            return self.choose_engine(config, machine)
        return EngineChoice(self.engines[0], f"the only one of backend '{self.name}'")


def _ignore(text: str) -> None:
    """Where nobody asks what goes on. A lambda could not be pickled, and sources are."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """All that an engine is given to load one version of a model."""

    name: str
    version: int
    model_folder: Path
    version_folder: Path
    model_file: Path
    config: ModelConfig
    """Possibly without inputs and outputs, when they are to be completed from the signature."""
    instance_kind: InstanceKind
    device: int | None
    """The GPU's number, or None on the CPU, and of KIND_MODEL."""
    instance_count: int
    """How many threads will call `execute` at once (1 unless the engine is thread-safe)."""
    memory_bytes: int = 0
    """That the worker may have; 0 = no bound."""
    shares_process: bool = False
    """Whether many other models are in the process: threads of its own are not worth it."""
    settings: EngineSettings = field(default_factory=EngineSettings)
    report: Callable[[str], None] = _ignore
    """Says in one line what goes on, for the index and the log: while the model loads, and later of what still goes on
    beside it. It stands until the next; "" = nothing goes on any more. From any thread; never waits."""


@dataclass(slots=True)
class Batch:
    """The inputs of one execution: the requests' tensors one after the other along the first dimension; with
    max_batch_size 0 exactly one request, in shapes of its own. Not frozen: its room changes with each."""

    inputs: Mapping[str, Tensor]
    """Views on shared memory, valid until `execute` returns."""
    requested_outputs: tuple[str, ...]
    """Only these are wanted."""
    request_sizes: tuple[int, ...]
    """How many rows of the first dimension belong to each request; (1,) without batching."""
    cuts: Mapping[str, Sequence[tuple[int, ...]]] = field(default_factory=dict)
    """By output, the shapes of the requests' parts, for outputs that hold these one behind the other and not rows."""
    may_stay: tuple[str, ...] = ()
    """The outputs that may be References, for models whose properties have DEVICE_PROPERTY."""
    room: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict, repr=False, compare=False)
    """By output, where one may be put; empty = nowhere. An engine that gives such an array itself for an output of its
    datatype and shape saves a copy. As it is written, it is nobody's input; it is not to be kept beyond `execute`."""
    _arrays: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def arrays(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """The inputs as arrays, made once; a batch of the same shapes on the same memory may be the same object."""
        if not self._arrays:
            self._arrays.update((name, tensor.numpy()) for name, tensor in self.inputs.items())
        return self._arrays


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The outputs of one execution, with the rows of the batch in its order."""

    outputs: Mapping[str, np.ndarray[Any, Any] | Tensor]
    """Object arrays of bytes or str for BYTES. Rows of failed requests may hold anything but must be there."""
    failures: Mapping[int, ServeError] = field(default_factory=dict)
    """By the request's place in the batch."""
    kept: Sequence[object] = ()
    """What References among the outputs refer to: kept until the server has returned them."""


class LoadedModel(Protocol):
    """A model in an engine. An exception from `execute` fails the whole batch; a ServeError keeps its code."""

    @property
    def signature(self) -> Signature: ...

    def warm_up(self, samples: Sequence[Batch]) -> None:
        """Run the samples (without any: what the engine chooses), so that the first request is as fast as the next."""

    def execute(self, batch: Batch) -> BatchResult: ...

    def close(self) -> None: ...


class Execution(Protocol):
    """Runs a model's batches one at a time, each beside those of the model's other executions. On one thread."""

    def input_memory(self, rows: int) -> Mapping[str, memoryview]:
        """By input, where a batch of `rows` is best put before `start`; empty = anywhere."""

    def start(self, batch: Batch) -> None:
        """Begin to run a batch, which stays as it is until `result`. Raises: as `LoadedModel.execute`."""

    @property
    def is_done(self) -> bool:
        """Whether `result` would not wait."""

    def result(self) -> BatchResult:
        """Wait for the batch that was started last. Outputs are valid until the next is. Raises: as `start`."""


class SequentialExecution:
    """An execution that is done when it has been started."""

    is_done = True

    def __init__(self, model: LoadedModel) -> None:
        self._execute = model.execute
        self._results: list[BatchResult] = []

    def input_memory(self, rows: int) -> Mapping[str, memoryview]:
        return {}

    def start(self, batch: Batch) -> None:
        self._results.append(self._execute(batch))

    def result(self) -> BatchResult:
        return self._results.pop()


_POLL_SECONDS = 0.0001
"""For how long a check whether a thread is done leaves the GIL to it; what comes meanwhile waits as long."""


class ThreadedExecution:
    """An execution of a model that lets go of the GIL as it runs: by a thread, while another batch is gathered."""

    def __init__(self, model: LoadedModel, thread: ThreadPoolExecutor) -> None:
        """`thread`: of all executions of the model, whose batches run one after the other."""
        self._execute = model.execute
        self._thread = thread
        self._running: Future[BatchResult]

    def input_memory(self, rows: int) -> Mapping[str, memoryview]:
        return {}

    def start(self, batch: Batch) -> None:
        self._running = self._thread.submit(self._execute, batch)

    @property
    def is_done(self) -> bool:
        return bool(wait((self._running,), _POLL_SECONDS).done)

    def result(self) -> BatchResult:
        return self._running.result()


def model_executions(model: LoadedModel) -> Sequence[Execution]:
    """As many as a loaded model may have batches under way at once, on one instance: its attribute `executions` where
    it has one (a model that one thread calls), else one."""
    executions: Sequence[Execution] = getattr(model, "executions", ())
    return executions or (SequentialExecution(model),)


def model_reads_files(model: LoadedModel) -> bool:
    """Whether the inputs of a lone request may stay where its client left them, in a file that may be cut at any time:
    its attribute `reads_files` where it has one. It is so of a model that never holds the GIL while it reads."""
    reads: bool = getattr(model, "reads_files", False)
    return reads


def model_properties(model: object) -> Mapping[str, str]:
    """What a loaded model says of how it runs, for its metadata: its attribute `properties` where it has one.

    Names and texts for people and scripts, e.g. {"target": "gpu"}. They may change as long as the model lives; the
    server takes them up when the model is loaded and with each report. Read from any thread.
    """
    properties: Mapping[str, str] = getattr(model, "properties", {})
    return properties
