"""AMD Inference Server's models as ModelConfig messages.

Its shapes are those of one item, and its workers batch: so a translated model has a max_batch_size, which falls to 0
when the loaded model turns out not to batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rocserve.backends.registry import ENSEMBLE_PLATFORM
from rocserve.config.amd.chain import link
from rocserve.config.amd.model import AmdModel, AmdTensor
from rocserve.config.datatypes import type_number
from rocserve.core.errors import invalid_argument
from rocserve.protocol.model_config_pb2 import ModelConfig, ModelInput, ModelOutput

BATCH_SIZE = 64
"""The batch of AMD Inference Server's MIGraphX and rocAL workers, unless the parameter `batch` says otherwise."""

_EXTENSIONS = {
    "tensorflow_graphdef": ".pb",
    "onnx_onnxv1": ".onnx",
    "migraphx_mxr": ".mxr",
    "rocal_json": ".json",
}
"""A single model's file may have any name; its platform tells the extension."""


@dataclass(frozen=True, slots=True)
class TranslatedModel:
    message: ModelConfig
    model_filenames: tuple[str, ...]
    """Names or patterns of the model's file; empty for an ensemble."""


def translate(models: Sequence[AmdModel], name: str, source: str) -> tuple[TranslatedModel, ...]:
    """One model, or for a chain the ensemble, which bears the folder's name, followed by its members.

    Raises:
        ServeError: INVALID_ARGUMENT for a name that is not the folder's, or a chain whose ids do not join.
    """
    if models[0].name != name:
        first = "; the first model of a chain names the chain" if len(models) > 1 else ""
        raise invalid_argument(
            f"unexpected directory name '{name}' for model '{models[0].name}', directory name must equal model name"
            f"{first}"
        )
    if len(models) == 1:
        return (_model(models[0], name, source),)
    chain = link(models, name, source)
    members = tuple(_model(step.stage, step.member, source) for step in chain.steps)
    ensemble = ModelConfig(name=name, platform=ENSEMBLE_PLATFORM)
    ensemble.max_batch_size = min(member.message.max_batch_size for member in members)
    for end, tensor in chain.inputs:
        _fill(ensemble.input.add(), tensor, end)
    for end, tensor in chain.outputs:
        _fill(ensemble.output.add(), tensor, end)
    for step in chain.steps:
        ensemble.ensemble_scheduling.step.add(
            model_name=step.member, model_version=-1, input_map=step.input_map, output_map=step.output_map
        )
    return (TranslatedModel(ensemble, ()), *members)


def _model(model: AmdModel, name: str, source: str) -> TranslatedModel:
    message = ModelConfig(name=name, platform=model.platform, default_model_filename=model.id)
    message.max_batch_size = _batch_size(model, source)
    if message.max_batch_size > 1:
        message.dynamic_batching.SetInParent()
    for tensor in model.inputs:
        _fill(message.input.add(), tensor, tensor.name)
    for tensor in model.outputs:
        _fill(message.output.add(), tensor, tensor.name)
    for key, value in model.parameters.items():
        # `batch` too: MIGraphX compiles the one size that it says.
        message.parameters[key].string_value = value
    extension = _EXTENSIONS.get(model.platform)
    filenames = (model.id,) if model.id else (f"*{extension}",) if extension else ()
    return TranslatedModel(message, filenames)


def _batch_size(model: AmdModel, source: str) -> int:
    text = model.parameters.get("batch", str(BATCH_SIZE))
    if not text.isdecimal() or not 1 <= int(text) < 2**31:
        raise invalid_argument(f"{source}: parameter 'batch' must be a positive integer, got '{text}'")
    return int(text)


def _fill(tensor: ModelInput | ModelOutput, given: AmdTensor, name: str) -> None:
    tensor.name = name
    tensor.data_type = type_number(given.datatype)
    tensor.dims.extend(given.shape or (1,))
    if not given.shape:
        tensor.reshape.SetInParent()
