"""The common parts of the models that the parameter `preprocess` generates; see images.py and texts.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from rocserve.config.datatypes import type_number
from rocserve.config.pbtxt import format_model_config
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import ModelConfig as PlainConfig
from rocserve.core.model_config import OutputConfig
from rocserve.presets import PREPROCESS
from rocserve.protocol.model_config_pb2 import ModelConfig, ModelInput, ModelOutput

Files = Mapping[PurePosixPath, bytes]


@dataclass(frozen=True, slots=True)
class GeneratedModel:
    name: str
    files: Files


def generated(message: ModelConfig, files: Mapping[str, str | bytes]) -> GeneratedModel:
    texts = {"config.pbtxt": format_model_config(message), **files}
    return GeneratedModel(
        message.name,
        {PurePosixPath(path): text.encode() if isinstance(text, str) else text for path, text in texts.items()},
    )


def model_file(config: PlainConfig, module: str) -> str:
    """Return model.py of a Python model whose class is in `module`."""
    return f'"""Made of `{PREPROCESS}: {config.parameters[PREPROCESS]}`."""\n\nfrom {module} import TritonPythonModel\n'


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
