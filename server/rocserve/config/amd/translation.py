"""AMD Inference Server's models as ModelConfig messages.

Its shapes are those of one item, and its workers batch: so a translated model has a max_batch_size, which falls to 0
when the loaded model turns out not to batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from rocserve.backends.registry import ENSEMBLE_PLATFORM
from rocserve.config.amd.model import AmdModel, AmdTensor
from rocserve.config.datatypes import type_number
from rocserve.core.errors import invalid_argument
from rocserve.protocol.model_config_pb2 import ModelConfig, ModelInput, ModelOutput


@dataclass(frozen=True, slots=True)
class ChainStep:
    member: str
    """The name under which the stage is served."""
    stage: AmdModel
    input_map: dict[str, str]
    """The stage's input -> the tensor of the ensemble."""
    output_map: dict[str, str]


@dataclass(frozen=True, slots=True)
class Chain:
    """The steps, and the tensors that the client gives and gets (under their names in the ensemble)."""

    steps: tuple[ChainStep, ...]
    inputs: tuple[tuple[str, AmdTensor], ...]
    outputs: tuple[tuple[str, AmdTensor], ...]


def link(stages: Sequence[AmdModel], name: str, source: str) -> Chain:
    """Join the stages: an input takes the output of the same id; other ends belong to the client.

    Raises:
        ServeError: INVALID_ARGUMENT when the ids do not make a chain.
    """
    written = _written_ids(stages, source)
    read = {tensor.id for stage in stages for tensor in stage.inputs if tensor.id}
    inner = written & read
    inputs: dict[str, AmdTensor] = {}
    outputs: dict[str, AmdTensor] = {}
    steps = []
    for index, (stage, member) in enumerate(zip(stages, _member_names(stages, name), strict=True)):
        where = f"{source}: models[{index}] ('{stage.name}')"
        input_map = {}
        for tensor in stage.inputs:
            if tensor.id in inner:
                input_map[tensor.name] = _inner_name(tensor.id)
                continue
            if index > 0 and tensor.id:
                raise invalid_argument(
                    f"{where}: input '{tensor.name}' has id '{tensor.id}', which no output has; ids of outputs:"
                    f" {', '.join(sorted(written)) or 'none'}"
                )
            _add_end(inputs, tensor, "inputs", where)
            input_map[tensor.name] = tensor.name
        output_map = {}
        for tensor in stage.outputs:
            if tensor.id in inner:
                output_map[tensor.name] = _inner_name(tensor.id)
                continue
            end = _output_name(tensor, inputs, where)
            _add_end(outputs, tensor, "outputs", where, end)
            output_map[tensor.name] = end
        steps.append(ChainStep(member, stage, input_map, output_map))
    if not inputs or not outputs:
        end = "input" if not inputs else "output"
        raise invalid_argument(f"{source}: every {end} is linked to another stage; leave one with an empty id")
    return Chain(tuple(steps), tuple(inputs.items()), tuple(outputs.items()))


def _written_ids(stages: Sequence[AmdModel], source: str) -> set[str]:
    ids = [tensor.id for stage in stages for tensor in stage.outputs if tensor.id]
    for tensor_id, count in Counter(ids).items():
        if count > 1:
            raise invalid_argument(f"{source}: {count} outputs have the id '{tensor_id}'; each id may stand once")
    return set(ids)


def _inner_name(tensor_id: str) -> str:
    """A tensor between stages; the prefix keeps it apart from the names of the client's tensors."""
    return f"id:{tensor_id}"


def _output_name(tensor: AmdTensor, inputs: dict[str, AmdTensor], where: str) -> str:
    """An ensemble's tensors share one space of names, so an output named as an input goes by its id."""
    if tensor.name not in inputs:
        return tensor.name
    if tensor.id and tensor.id not in inputs:
        return tensor.id
    raise invalid_argument(
        f"{where}: output '{tensor.name}' has the name of an input of the chain; give it an id of its own, under which"
        " it will be answered"
    )


def _add_end(ends: dict[str, AmdTensor], tensor: AmdTensor, what: str, where: str, name: str = "") -> None:
    name = name or tensor.name
    if name in ends:
        raise invalid_argument(f"{where}: the chain would have two {what} named '{name}'; rename one or link it by id")
    ends[name] = tensor


def _member_names(stages: Sequence[AmdModel], name: str) -> list[str]:
    """<chain>_<stem of the stage's file>; the stage's place is added where two stages share a file."""
    stems = [PurePosixPath(stage.id).stem for stage in stages]
    shared = {stem for stem, count in Counter(stems).items() if count > 1}
    return [f"{name}_{stem}_{index}" if stem in shared else f"{name}_{stem}" for index, stem in enumerate(stems)]


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
