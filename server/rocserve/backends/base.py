"""Defines the contracts of a backend: how it registers, and what its engine does in a worker. A backend is a folder of
this package. Its `__init__.py` defines `BACKEND: BackendSpec` and imports no engine; the server reads only that. An
engine's module is imported in a worker, where its `load` returns a LoadedModel or a RequestModel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rocserve.core.errors import ServeError
from rocserve.core.load_check import NOT_CHECKED, LoadCheckReport
from rocserve.core.model_config import InstanceKind, ModelConfig
from rocserve.core.padding import Lengths, PaddedOutput
from rocserve.core.requests import Signature
from rocserve.core.tensors import Tensor
from rocserve.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One of a backend's engines, as the server sees it without importing the engine."""

    name: str
    """The value of the parameter `engine` that selects this engine, such as "onnxruntime"."""
    module: str
    """Defines `load(model: ModelSource) -> LoadedModel`, or, if the backend answers requests, `load(model:
    RequestModelSource) -> RequestModel`. Imported in the worker. Any exception becomes the reason in the repository
    index."""
    thread_safe: bool
    """Several threads may execute one loaded model at the same time; else each instance is a separate worker."""
    forks_from_zygote: bool
    """The zygote, which has imported the engine, may fork the worker; else the worker is started by exec."""
    shares_process: bool = False
    """The models may share a process with other models."""
    preload: tuple[str, ...] = ()
    """Modules that the zygote imports for this engine, besides its own, if they are installed."""
    gpu_module: str = ""
    """The module that runs the models on a GPU if it is installed, with one worker for each instance; "" = CPU only."""
    gpu_files: tuple[str, ...] = ()
    """Files in that module's folder, at least one of which must exist; empty = the module is enough."""
    gpu_plugins: tuple[str, ...] = ()
    """Modules any of which, next to `gpu_module`, replaces those files."""
    compiles_ahead: bool = False
    """The workers keep compiled programs in the cache."""
    takes_kind_model: bool = False
    """A worker of KIND_MODEL gets all GPUs, and the model file chooses its devices; else KIND_MODEL means KIND_AUTO."""
    needs_migraphx: bool = False
    """The workers load MIGraphX, so they are started as its installation requires (migraphx/installation.py)."""

    @property
    def zygote_modules(self) -> tuple[str, ...]:
        """Return what the zygote imports before it forks a worker of this engine."""
        return (*self.preload, self.module) if self.forks_from_zygote else ()

    def has_gpu_parts(self, machine: Machine) -> bool:
        """Return whether the module that runs the models on a GPU is installed, with its files or a plugin."""
        if not self.gpu_module:
            return False
        by_plugin = any(map(machine.is_installed, self.gpu_plugins)) and machine.is_installed(self.gpu_module)
        return by_plugin or machine.is_installed(self.gpu_module, self.gpu_files)


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """The engine that runs a model, and why."""

    engine: EngineSpec
    reason: str
    """For the log and the model's metadata; continues "engine onnxruntime: "."""
    fallback: EngineChoice | None = None
    """The next choice, with a warning, if the engine cannot load the model: another engine, or no GPUs."""
    auto_takes_gpus: bool = False
    """Instances of KIND_AUTO use the GPUs if there are any; else the CPU."""


class Machine(Protocol):
    """Describes the machine, without loading an engine."""

    @property
    def gpus(self) -> Sequence[int]:
        """The usable AMD GPUs, by the numbers in HIP_VISIBLE_DEVICES."""

    @property
    def migraphx(self) -> str:
        """Why MIGraphX cannot be used here; "" = it can."""

    def is_installed(self, module: str, files: tuple[str, ...] = ()) -> bool:
        """Return whether a Python module is installed; if files are named, its folder must have one of them."""

    def architecture(self, gpu: int) -> str:
        """Return a GPU's architecture, such as "gfx90a"; "" = not known."""

    def cores(self, policy: str) -> Sequence[int]:
        """Return the CPU cores of a host policy; empty = any. Raises ServeError if it cannot be applied here."""

    def most_instances(self, gpus: int) -> int:
        """Return the most instances that a model may have on this number of GPUs; 0 = on the CPU."""

    def loader(self, engine: EngineSpec) -> tuple[str, ...]:
        """Return the words before the interpreter in the engine's worker command. Raises ServeError (UNAVAILABLE)."""


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """A backend: the platforms that it serves, its model files and its engines."""

    name: str
    """The canonical name, such as "onnx"."""
    platforms: tuple[str, ...]
    """The values of `platform` and `backend` in config.pbtxt that name the backend; metadata reports the first."""
    engines: tuple[EngineSpec, ...]
    """The engines that can run the models; the first is used unless `choose_engine` decides otherwise."""
    model_filenames: tuple[str, ...]
    """Model files in a version folder, of which the first that exists is used ("*.json": the only such file)."""
    file_endings: tuple[str, ...] = ()
    """Endings, in lower case, by which a file of any name is recognised as a model of this backend."""
    default_max_batch_size: int = 64
    """The default of max_batch_size if the model can batch, unless the model takes less."""
    answers_requests: bool = False
    """The models see each request separately (see `request_model.py`), not batches of tensors."""
    takes_ragged_batches: bool = False
    """Requests of different shapes may share a batch (allow_ragged_batch, batch_input, batch_output)."""
    takes_operators: bool = False
    """The engine can load libraries of custom operators (model_operations)."""
    models_are_data: bool = False
    """No model file contains code. A load request may choose only such a backend, and may bring only such files."""
    marks_of_programs: tuple[bytes, ...] = ()
    """Byte strings that occur only in model files with compiled code. No load request may bring such a file."""
    request_parameters: frozenset[str] = frozenset()
    """Parameters of the model and its execution accelerators that a load request may set, because none of them names
    code, a program, or a file outside the model's folder. All others can only be set in the repository."""
    choose_engine: Callable[[ModelConfig, Machine], EngineChoice] | None = None
    """Raises ServeError if the engine that the configuration asks for cannot be used here."""

    def engine_for(self, config: ModelConfig, machine: Machine) -> EngineChoice:
        """Return the engine for a model of this configuration. Raises ServeError as `choose_engine`."""
        if self.choose_engine is not None:
            return self.choose_engine(config, machine)
        return EngineChoice(self.engines[0], f"the only one of backend '{self.name}'")


def _ignore(text: str) -> None:
    """Ignore a report. A lambda could not be pickled, and sources are pickled."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Describes one version of a model to the engine that loads it."""

    name: str
    version: int
    model_folder: Path
    version_folder: Path
    model_file: Path
    config: ModelConfig
    """Without inputs and outputs if the signature completes them."""
    instance_kind: InstanceKind
    device: int | None
    """The GPU's number; None = CPU or KIND_MODEL."""
    instance_count: int
    """Number of threads that may call `execute` at the same time; 1 unless the engine is thread-safe."""
    memory_bytes: int = 0
    """The worker's bound; 0 = none."""
    shares_process: bool = False
    """Many other models are in the process, so the engine should start no threads."""
    settings: EngineSettings = field(default_factory=EngineSettings)
    report: Callable[[str], None] = _ignore
    """Reports in one line what the engine is doing, for the index and the log, during the load and later. The index
    shows a report until the next; "" = nothing. From any thread; never waits."""
    report_check: Callable[[str], None] = _ignore
    """As `report`, while the engine checks the model during its load: the version's state is CHECKING until "" ends
    it."""

    @contextmanager
    def checking(self, what: str) -> Iterator[None]:
        """Show the model as being checked."""
        self.report_check(what)
        try:
            yield
        finally:
            self.report_check("")


@dataclass(slots=True)
class Batch:
    """The inputs of one execution: the requests' tensors, joined along the first dimension; with max_batch_size 0, the
    tensors of one request. Not frozen, because `room` changes for each batch."""

    inputs: Mapping[str, Tensor]
    """Views of memory that is reused after `execute` has returned."""
    requested_outputs: tuple[str, ...]
    """The only outputs that are needed."""
    request_sizes: tuple[int, ...]
    """Rows of each request in the first dimension; (1,) without batching."""
    cuts: Mapping[str, Sequence[tuple[int, ...]]] = field(default_factory=dict)
    """Shapes of the requests' parts, by output, for outputs that contain the parts one after the other, not rows."""
    padded: Mapping[str, PaddedOutput] = field(default_factory=dict)
    """The outputs that are cut back for each request, because its inputs were padded."""
    outputs_by_request: Sequence[tuple[str, ...]] = ()
    """The outputs that each request wants; empty = each wants all of `requested_outputs`."""
    reference_outputs: tuple[str, ...] = ()
    """Outputs that may be References, for models whose properties have DEVICE_PROPERTY."""
    room: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict, repr=False, compare=False)
    """Memory for outputs, by name; empty = none. If an engine returns such an array as an output of the same datatype
    and shape, a copy is saved. An array must not be kept after `execute`, and no input shares its memory."""
    _arrays: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def arrays(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """The inputs as arrays, made once. Later batches of equal shapes in the same memory may be this same Batch."""
        if not self._arrays:
            self._arrays.update((name, tensor.numpy()) for name, tensor in self.inputs.items())
        return self._arrays


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The outputs of one execution, with the batch's rows in their order."""

    outputs: Mapping[str, np.ndarray[Any, Any] | Tensor]
    """BYTES as object arrays of bytes or str. Rows of failed requests must exist, with any content."""
    failures: Mapping[int, ServeError] = field(default_factory=dict)
    """Errors by the request's index in the batch."""
    kept: Sequence[object] = ()
    """Objects that References among the outputs refer to; kept until the server has returned the references."""


class LoadedModel(Protocol):
    """A model in an engine. If `execute` raises, the whole batch fails; a ServeError keeps its code."""

    @property
    def signature(self) -> Signature: ...

    def warm_up(self, samples: Sequence[Batch]) -> ServeError | None:
        """Run the samples, or the engine's choice if there are none, so that the first request is fast. Returns the
        model's refusal of that choice; None = it has taken it, or there are samples."""

    def execute(self, batch: Batch) -> BatchResult: ...

    def close(self) -> None: ...


class Execution(Protocol):
    """Runs batches of a model, one at a time, next to the model's other executions. All calls come on one thread."""

    def input_memory(self, rows: int, sizes: Lengths) -> Mapping[str, memoryview]:
        """Return memory, by name, to which a batch's inputs are copied before `start`; empty = any memory will do.
        `sizes`: of the batch's bucket; empty if the model pads nothing."""
        return {}

    def start(self, batch: Batch) -> None:
        """Begin to run a batch, which must not change until `result`. Raises as `LoadedModel.execute`."""

    @property
    def is_done(self) -> bool:
        """Whether `result` would return without waiting."""

    def result(self) -> BatchResult:
        """Wait for the last batch started. Outputs are valid until the next `start`. Raises as `start`."""


class SequentialExecution(Execution):
    """Runs each batch in `start`."""

    is_done = True

    def __init__(self, model: LoadedModel) -> None:
        self._execute = model.execute
        self._results: list[BatchResult] = []

    def start(self, batch: Batch) -> None:
        self._results.append(self._execute(batch))

    def result(self) -> BatchResult:
        return self._results.pop()


class ThreadedExecution(Execution):
    """Runs each batch on a thread, while another batch is gathered. For models that release the GIL when they run."""

    def __init__(self, model: LoadedModel, thread: ThreadPoolExecutor) -> None:
        """`thread`: shared by all executions of the model, whose batches run one after the other."""
        self._execute = model.execute
        self._thread = thread
        self._running: Future[BatchResult]

    def start(self, batch: Batch) -> None:
        self._running = self._thread.submit(self._execute, batch)

    @property
    def is_done(self) -> bool:
        # The check leaves the GIL to that thread for 0.1 ms. A batch that comes meanwhile waits as long.
        return bool(wait((self._running,), 0.0001).done)

    def result(self) -> BatchResult:
        return self._running.result()


def model_executions(model: LoadedModel) -> Sequence[Execution]:
    """Return an execution for each batch that an instance may have in flight: the model's attribute `executions`, which
    only a model with one calling thread may have, or one SequentialExecution."""
    executions: Sequence[Execution] = getattr(model, "executions", ())
    return executions or (SequentialExecution(model),)


def model_preparation(model: LoadedModel) -> Callable[[], bool]:
    """Return the model's attribute `prepare_more`, or what prepares nothing. For a fraction of a second, it does work
    that makes later batches faster, on the thread of the executions while none of them runs a batch, and returns
    whether more is left. Only a model with one calling thread may have it."""
    prepare: Callable[[], bool] = getattr(model, "prepare_more", bool)
    return prepare


def model_reads_files(model: LoadedModel) -> bool:
    """Return the model's attribute `reads_files`, or False. True lets a lone request's inputs stay in its client's
    file, which may be truncated at any time. Only a model that never holds the GIL while it reads may set it."""
    reads: bool = getattr(model, "reads_files", False)
    return reads


def model_unchanged(model: object) -> AbstractContextManager[None]:
    """Return the result of the model's attribute `unchanged`, or what does nothing. At its end the context gives the
    model the state that it had before. For runs on inputs that no client has sent."""
    context: AbstractContextManager[None] = getattr(model, "unchanged", nullcontext)()
    return context


def model_properties(model: object) -> Mapping[str, str]:
    """Return a loaded model's attribute `properties`, or nothing: how the model runs, for its metadata. Users and
    scripts read names and texts, such as {"target": "gpu"}. They may change; the server reads them after the load and
    with each report. From any thread."""
    properties: Mapping[str, str] = getattr(model, "properties", {})
    return properties


def model_load_check(model: object) -> LoadCheckReport:
    """Return a loaded model's attribute `load_check`, or NOT_CHECKED: what its engine found when it checked it."""
    report: LoadCheckReport = getattr(model, "load_check", NOT_CHECKED)
    return report
