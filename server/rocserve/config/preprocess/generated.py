"""The common parts of the models that the parameter `preprocess` generates; see images.py and texts.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from rocserve.backends.registry import ENSEMBLE_PLATFORM
from rocserve.config.datatypes import type_number
from rocserve.config.model_folder import CONFIG_FILENAME, LABELS_FILENAME
from rocserve.config.pbtxt import format_model_config
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import ModelConfig as PlainConfig
from rocserve.core.model_config import OutputConfig
from rocserve.presets import PREPROCESS
from rocserve.protocol.model_config_pb2 import ModelConfig, ModelInput, ModelInstanceGroup, ModelOutput

Files = Mapping[PurePosixPath, bytes]


@dataclass(frozen=True, slots=True)
class GeneratedModel:
    """A model that `preprocess` generates."""

    name: str
    files: Files


@dataclass(frozen=True, slots=True)
class Postprocess:
    """A Python model that turns the outputs of the user's model into answers."""

    message: ModelConfig
    module: str
    """The module that defines TritonPythonModel."""
    inputs: Mapping[str, str]
    """The user's model's output -> the input of the post-processing."""
    labels: Sequence[str] | None = None
    """The lines of labels.txt; None = it has no such file."""
    is_detector: bool = False

    def model(self, config: PlainConfig) -> GeneratedModel:
        labels = {} if self.labels is None else {LABELS_FILENAME: "".join(f"{label}\n" for label in self.labels)}
        return generated(self.message, {"1/model.py": model_file(config, self.module), **labels})


def generated(message: ModelConfig, files: Mapping[str, str | bytes]) -> GeneratedModel:
    texts = {CONFIG_FILENAME: format_model_config(message), **files}
    return GeneratedModel(
        message.name,
        {PurePosixPath(path): text.encode() if isinstance(text, str) else text for path, text in texts.items()},
    )


def model_file(config: PlainConfig, module: str) -> str:
    """Return model.py of a Python model whose class is in `module`."""
    return f'"""Made of `{PREPROCESS}: {config.parameters[PREPROCESS]}`."""\n\nfrom {module} import TritonPythonModel\n'


def python_model(name: str, max_batch_size: int) -> ModelConfig:
    message = ModelConfig(name=name, backend="python", max_batch_size=max_batch_size)
    message.instance_group.add(count=1, kind=ModelInstanceGroup.KIND_CPU)
    return message


def ensemble(
    name: str, last: ModelConfig, steps: Iterable[tuple[str, Mapping[str, str], Mapping[str, str]]]
) -> ModelConfig:
    """Make an ensemble with the outputs of its last step. `steps`: each model's name, input map and output map."""
    message = ModelConfig(name=name, platform=ENSEMBLE_PLATFORM)
    for output in last.output:
        message.output.add(name=output.name, data_type=output.data_type, dims=output.dims)
    for model, inputs, outputs in steps:
        message.ensemble_scheduling.step.add(model_name=model, model_version=-1, input_map=inputs, output_map=outputs)
    return message


def add_tensor(tensors: Any, name: str, datatype: DataType, dims: Sequence[int]) -> Any:
    tensor: ModelInput | ModelOutput = tensors.add(name=name, data_type=type_number(datatype))
    tensor.dims.extend(dims)
    return tensor


def is_number(output: OutputConfig) -> bool:
    """Whether numpy can read the output in post-processing; numpy has no BF16."""
    return output.datatype not in (DataType.BYTES, DataType.BF16)


class PresetUnfit(ServeError):
    """The preset does not fit the model."""


def unfit(config: PlainConfig, expected: str, reason: str = "") -> PresetUnfit:
    inputs = ", ".join(f"{entry.name} {entry.datatype.value} {list(entry.dims)}" for entry in config.inputs)
    outputs = ", ".join(f"{entry.name} {entry.datatype.value} {list(entry.dims)}" for entry in config.outputs)
    return PresetUnfit(
        StatusCode.INVALID_ARGUMENT,
        f"model '{config.name}': {PREPROCESS} '{config.parameters[PREPROCESS]}' is for a model with {expected}; this"
        f" one takes {inputs} and gives {outputs}{f': {reason}' if reason else ''}",
    )
