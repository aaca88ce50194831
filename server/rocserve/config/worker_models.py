"""What AMD Inference Server's clients ask for by the name of a worker and a file: as configurations of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rocserve.backends.registry import ENSEMBLE_PLATFORM
from rocserve.config.amd_dialect import BATCH_SIZE
from rocserve.config.datatypes import type_number
from rocserve.config.sources import Dialect, WrittenConfig, WrittenModel
from rocserve.core.errors import ServeError, StatusCode, invalid_argument
from rocserve.core.model_config import InputConfig, OutputConfig
from rocserve.core.model_config import ModelConfig as PlainConfig
from rocserve.core.requests import ParameterValue
from rocserve.protocol.model_config_pb2 import ModelConfig, ModelInput, ModelOutput

SOURCE = "the parameters of the worker"


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """A worker that can be had."""

    platforms: Mapping[str, str]
    """By the file's suffix, best first: where the named file is not there, one beside it is taken, as that server
    does."""
    engine: str = ""
    """The parameter `engine` of its models; "" = the server's own choice."""


_GRAPHDEF = {".pb": "tensorflow_graphdef", ".graphdef": "tensorflow_graphdef"}
_WORKERS: Mapping[str, WorkerKind] = {
    "migraphx": WorkerKind({".onnx": "onnx_onnxv1", ".mxr": "migraphx_mxr"} | _GRAPHDEF),
    "onnx": WorkerKind({".onnx": "onnx_onnxv1"}),
    "onnxruntime": WorkerKind({".onnx": "onnx_onnxv1"}, engine="onnxruntime"),
    "rocal": WorkerKind({".json": "rocal_json"}),
    "tensorflow": WorkerKind(_GRAPHDEF),
    "tfzendnn": WorkerKind(_GRAPHDEF),
}
_GIVES_WHAT_IS_DECLARED = frozenset({"rocal_json"})
_FOREIGN = {
    "ptzendnn": "export the model to ONNX and load it with the worker 'migraphx'",
    "xmodel": "such models run on FPGAs only; load the ONNX model that it was made from with the worker 'migraphx'",
    "cplusplus": "it is a library against that server's own C++ interface; write a Python model of the repository",
    "python": "its file is a program; put it into the repository, as a model with the backend 'python'",
}
_NOT_PASSED_ON = frozenset(("model", "batch", "pad_batch", "batchers"))
"""Parameters that are not the model's: those read here, and those that tune that server's own workers."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker that was asked for."""

    kind: WorkerKind
    file: str
    """The model's file as the client wrote it."""
    batch: int | None
    parameters: Mapping[str, str]

    def candidates(self) -> tuple[str, ...]:
        """The files that may be meant, best first."""
        path = Path(self.file)
        if not path.name:
            return (self.file,)
        beside = [str(path.with_suffix(suffix)) for suffix in self.kind.platforms]
        compiled = [f"{path.with_suffix('')}_b{self.batch or BATCH_SIZE}.mxr"] if ".mxr" in self.kind.platforms else []
        return tuple(dict.fromkeys([self.file, *beside, *compiled]))


def read_worker(name: str, parameters: Mapping[str, ParameterValue]) -> Worker:
    """
    Raises:
        ServeError: NOT_FOUND, there is no such worker; UNIMPLEMENTED, it cannot be had here; INVALID_ARGUMENT for its
            parameters.
    """
    kind = _WORKERS.get(name)
    if kind is None and name in _FOREIGN:
        raise ServeError(StatusCode.UNIMPLEMENTED, f"the worker '{name}' cannot be loaded: {_FOREIGN[name]}")
    if kind is None:
        raise ServeError(
            StatusCode.NOT_FOUND, f"there is no worker '{name}'; expected one of {', '.join(sorted(_WORKERS))}"
        )
    file = parameters.get("model")
    if not isinstance(file, str) or not file or "\0" in file:
        raise invalid_argument(
            f"the worker '{name}' needs the parameter 'model', the path of the model's file on the server; got {file!r}"
        )
    batch = parameters.get("batch")
    if batch is not None and (type(batch) is not int or not 1 <= batch < 2**31):
        raise invalid_argument(f"parameter 'batch' must be a positive integer, got {batch!r}")
    passed = {key: _text(value) for key, value in parameters.items() if key not in _NOT_PASSED_ON}
    if kind.engine:
        passed.setdefault("engine", kind.engine)
    return Worker(kind, file, batch, passed)


def worker_config(
    name: str, worker: Worker, file: Path, copies: int, following: PlainConfig | None = None
) -> WrittenConfig:
    """The model `name` of the worker's `file`; its tensors are to come from the model itself.

    Args:
        copies: how many batches may run side by side.
        following: what gets its outputs; an image pipeline then gives what that takes, its layout and datatype.

    Raises:
        ServeError: INVALID_ARGUMENT; the worker does not serve such files.
    """
    platform = worker.kind.platforms.get(file.suffix)
    if platform is None:
        expected = " or ".join(worker.kind.platforms)
        raise invalid_argument(f"parameter 'model' must name a file that ends in {expected}, got '{worker.file}'")
    message = ModelConfig(name=name, platform=platform, default_model_filename=file.name)
    message.max_batch_size = worker.batch or BATCH_SIZE
    if message.max_batch_size > 1:
        message.dynamic_batching.SetInParent()
    if copies > 1:
        message.instance_group.add(count=copies)
    if following is not None and platform in _GIVES_WHAT_IS_DECLARED:
        for entry in following.inputs:
            _fill(message.output.add(), entry, following, message.max_batch_size)
    for key, value in worker.parameters.items():
        message.parameters[key].string_value = value
    if worker.batch is not None:
        message.parameters["batch"].string_value = str(worker.batch)
    return _written(message, (file.name,))


def chain_config(name: str, first: PlainConfig, following: PlainConfig) -> WrittenConfig:
    """The ensemble `name` of a worker and of the endpoint that gets what it gives.

    Tensors are joined by their names; where those differ, by their order, which is all that that server knows.

    Raises:
        ServeError: INVALID_ARGUMENT; they do not fit.
    """
    message = ModelConfig(name=name, platform=ENSEMBLE_PLATFORM)
    batches = [config.max_batch_size for config in (first, following)]
    message.max_batch_size = min(batches)
    for entry in first.inputs:
        _fill(message.input.add(optional=entry.optional), entry, first, message.max_batch_size)
    for output in following.outputs:
        _fill(message.output.add(), output, following, message.max_batch_size)
    between = {output: f"{first.name}:{output}" for output in (entry.name for entry in first.outputs)}
    joined = _joined(first, following)
    steps = message.ensemble_scheduling.step
    steps.add(
        model_name=first.name,
        model_version=-1,
        input_map={entry.name: entry.name for entry in first.inputs},
        output_map={output: between[output] for output in joined.values()},
    )
    steps.add(
        model_name=following.name,
        model_version=-1,
        input_map={given: between[output] for given, output in joined.items()},
        output_map={entry.name: entry.name for entry in following.outputs},
    )
    return _written(message, ())


def _joined(first: PlainConfig, following: PlainConfig) -> Mapping[str, str]:
    """The output of the one by the input of the other."""
    outputs = [entry.name for entry in first.outputs]
    inputs = [entry.name for entry in following.inputs]
    if set(inputs) <= set(outputs):
        return {name: name for name in inputs}
    if len(inputs) == len(outputs):
        return dict(zip(inputs, outputs, strict=True))
    raise invalid_argument(
        f"'{following.name}' cannot come next: its inputs are {_names(inputs)}, and what comes before gives"
        f" {_names(outputs)}"
    )


def _written(message: ModelConfig, filenames: tuple[str, ...]) -> WrittenConfig:
    return WrittenConfig((WrittenModel(message, filenames),), Dialect.AMD, SOURCE)


def _fill(
    tensor: ModelInput | ModelOutput, entry: InputConfig | OutputConfig, config: PlainConfig, max_batch_size: int
) -> None:
    tensor.name = entry.name
    tensor.data_type = type_number(entry.datatype)
    # A member that batches, in an ensemble that does not: its batch is a dimension like any other.
    lead = [-1] if config.max_batch_size and not max_batch_size else []
    tensor.dims.extend([*lead, *entry.dims])


def _names(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _text(value: ParameterValue) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
