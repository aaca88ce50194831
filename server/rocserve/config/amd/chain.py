"""A chain of AMD Inference Server, [[models]] joined by the ids of their tensors, as an ensemble and its members."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from rocserve.config.amd.model import AmdModel, AmdTensor
from rocserve.core.errors import invalid_argument


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
