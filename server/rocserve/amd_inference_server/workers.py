"""AMD Inference Server's workers, which its clients ask for by a name and a file: as configurations of models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rocserve.amd_inference_server.configurations import (
    BATCH_SIZE,
    AmdModel,
    AmdTensor,
    fill,
    parameter_text,
    translated_model,
)
from rocserve.backends.registry import ENSEMBLE_PLATFORM
from rocserve.config.written import WrittenConfig, WrittenModel
from rocserve.core.errors import ServeError, StatusCode, invalid_argument
from rocserve.core.model_config import InputConfig, OutputConfig
from rocserve.core.model_config import ModelConfig as PlainConfig
from rocserve.core.requests import ParameterValue
from rocserve.protocol.model_config_pb2 import ModelConfig

_SOURCE = "the parameters of the worker"

_GRAPHDEF = {".pb": "tensorflow_graphdef", ".graphdef": "tensorflow_graphdef"}
_PLATFORMS: Mapping[str, Mapping[str, str]] = {
    "migraphx": {".onnx": "onnx_onnxv1", ".mxr": "migraphx_mxr"} | _GRAPHDEF,
    "onnx": {".onnx": "onnx_onnxv1"},
    "onnxruntime": {".onnx": "onnx_onnxv1"},
    "rocal": {".json": "rocal_json"},
    "tensorflow": _GRAPHDEF,
    "tfzendnn": _GRAPHDEF,
}
"""Of each worker, by the file's suffix, best first: where the named file is not there, one beside it is taken, as that
server does."""
_FOREIGN = {
    "ptzendnn": "export the model to ONNX and load it with the worker 'migraphx'",
    "xmodel": "such models run on FPGAs only; load the ONNX model that it was made from with the worker 'migraphx'",
    "cplusplus": "it is a library against that server's own C++ interface; write a Python model of the repository",
    "python": "its file is a program; put it into the repository, as a model with the backend 'python'",
}
_NOT_PASSED_ON = frozenset(("model", "share", "next", "pad_batch", "batchers"))
"""Parameters that are not the model's: those of the endpoint, and those that tune that server's own workers."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker that a client asks for."""

    platforms: Mapping[str, str]
    """By the file's suffix, best first."""
    file: str
    """The model's file as the client wrote it."""
    parameters: Mapping[str, str]
    """As the model's configuration holds them, `batch` among them."""

    def candidates(self) -> tuple[str, ...]:
        """The files that may be meant, best first."""
        path = Path(self.file)
        if not path.name:
            return (self.file,)
        beside = [str(path.with_suffix(suffix)) for suffix in self.platforms]
        batch = self.parameters.get("batch", BATCH_SIZE)
        compiled = [f"{path.with_suffix('')}_b{batch}.mxr"] if ".mxr" in self.platforms else []
        return tuple(dict.fromkeys([self.file, *beside, *compiled]))


def read_worker(name: str, parameters: Mapping[str, ParameterValue]) -> Worker:
    """Raises: ServeError: NOT_FOUND, there is no such worker; UNIMPLEMENTED, it cannot be had here; INVALID_ARGUMENT
    for its parameters."""
    if name in _FOREIGN:
        raise ServeError(StatusCode.UNIMPLEMENTED, f"the worker '{name}' cannot be loaded: {_FOREIGN[name]}")
    if name not in _PLATFORMS:
        raise ServeError(
            StatusCode.NOT_FOUND, f"there is no worker '{name}'; expected one of {', '.join(sorted(_PLATFORMS))}"
        )
    file = parameters.get("model")
    if not isinstance(file, str) or not file or "\0" in file:
        raise invalid_argument(
            f"the worker '{name}' needs the parameter 'model', the path of the model's file on the server; got {file!r}"
        )
    batch = parameters.get("batch", BATCH_SIZE)
    if type(batch) is not int or not 1 <= batch < 2**31:
        raise invalid_argument(f"parameter 'batch' must be a positive integer, got {batch!r}")
    passed = {key: parameter_text(value) for key, value in parameters.items() if key not in _NOT_PASSED_ON}
    if name == "onnxruntime":
        passed.setdefault("engine", "onnxruntime")
    return Worker(_PLATFORMS[name], file, passed)


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
    platform = worker.platforms.get(file.suffix)
    if platform is None:
        expected = " or ".join(worker.platforms)
        raise invalid_argument(f"parameter 'model' must name a file that ends in {expected}, got '{worker.file}'")
    outputs: tuple[AmdTensor, ...] = ()
    if following is not None and platform == "rocal_json":
        outputs = tuple(AmdTensor(entry.name, entry.datatype, entry.dims) for entry in following.inputs)
    model = AmdModel(name, platform, (), outputs, file.name, worker.parameters)
    written = translated_model(model, name, _SOURCE)
    if copies > 1:
        written.message.instance_group.add(count=copies)
    return WrittenConfig((written,), _SOURCE, is_amd=True)


def chain_config(name: str, first: PlainConfig, following: PlainConfig) -> WrittenConfig:
    """The ensemble `name` of a worker and of the endpoint that gets what it gives.

    Tensors are joined by their names; where those differ, by their order, which is all that that server knows.

    Raises:
        ServeError: INVALID_ARGUMENT; they do not fit.
    """
    message = ModelConfig(name=name, platform=ENSEMBLE_PLATFORM)
    message.max_batch_size = min(first.max_batch_size, following.max_batch_size)
    for entry in first.inputs:
        fill(message.input.add(optional=entry.optional), _end(entry, first, message))
    for output in following.outputs:
        fill(message.output.add(), _end(output, following, message))
    joined = _joined(first, following)
    between = {output: f"{first.name}:{output}" for output in joined.values()}
    steps = message.ensemble_scheduling.step
    steps.add(
        model_name=first.name,
        model_version=-1,
        input_map={entry.name: entry.name for entry in first.inputs},
        output_map=between,
    )
    steps.add(
        model_name=following.name,
        model_version=-1,
        input_map={given: between[output] for given, output in joined.items()},
        output_map={entry.name: entry.name for entry in following.outputs},
    )
    return WrittenConfig((WrittenModel(message),), _SOURCE, is_amd=True)


def _end(entry: InputConfig | OutputConfig, member: PlainConfig, ensemble: ModelConfig) -> AmdTensor:
    # A member that batches, in an ensemble that does not: its batch is a dimension like any other.
    lead = (-1,) if member.max_batch_size and not ensemble.max_batch_size else ()
    return AmdTensor(entry.name, entry.datatype, (*lead, *entry.dims))


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


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
