"""An ensemble against its members: every map names real tensors, and datatypes, shapes and batch sizes agree.

Rules and words are Triton's (its ensemble_utils).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from rocserve.config.datatypes import format_shape, type_name
from rocserve.core.datatypes import DataType
from rocserve.core.errors import invalid_argument
from rocserve.core.model_config import EnsembleStep, InputConfig, ModelConfig, OutputConfig

_VARIABLE = -1


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of the ensemble, and the model that its datatype and shape were taken from."""

    model: str
    datatype: DataType
    dims: tuple[int, ...]
    batches: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return (_VARIABLE, *self.dims) if self.batches else self.dims


def check_ensemble(config: ModelConfig, members: Mapping[str, ModelConfig | None]) -> bool:
    """Check a complete ensemble against its complete members; whether it is decoupled, as a member of it is.

    Args:
        members: by what the steps find them by; None, or no entry, for one that is not available.

    Raises:
        ServeError: INVALID_ARGUMENT with the first fault, in Triton's words.
    """
    check_members_available(config, members)
    tensors = _ensemble_ends(config)
    for step in config.ensemble_steps:
        member = members[step.member]
        assert member is not None
        if member.max_batch_size != 0 and member.max_batch_size < config.max_batch_size:
            raise invalid_argument(
                f"ensemble {config.name} allows maximum batch size {config.max_batch_size}, but it contains model"
                f" {step.model_name} which only allows maximum batch size to be {member.max_batch_size}"
            )
        _check_inputs(config.name, step, member, tensors)
        _check_outputs(config.name, step, member, tensors)
    return _check_streams(config, {name for name, member in members.items() if member is not None and member.decoupled})


def _check_streams(config: ModelConfig, decoupled: Set[str]) -> bool:
    """Whether answers of a decoupled member flow through the ensemble.

    Each of its answers is a stream element; a step cannot join elements of different streams. Raises: ServeError.
    """
    streams = {tensor.name: 0 for tensor in config.inputs}
    waiting = list(enumerate(config.ensemble_steps, start=1))
    while ready := [entry for entry in waiting if all(name in streams for name in entry[1].input_map.values())]:
        for number, step in ready:
            sources = {streams[name] for name in step.input_map.values()}
            if len(sources) > 1:
                # Triton names the ensemble where the step's model is meant.
                raise invalid_argument(
                    f"in ensemble {config.name}, step of model '{config.name}' receives inputs originated from"
                    f" different decoupled models; it is the step of '{step.model_name}'"
                )
            stream = number if step.member in decoupled else next(iter(sources), 0)
            streams.update(dict.fromkeys(step.output_map.values(), stream))
        waiting = [entry for entry in waiting if entry not in ready]
    return any(streams.values())


def check_members_available(config: ModelConfig, members: Mapping[str, ModelConfig | None]) -> None:
    """Raises: ServeError INVALID_ARGUMENT that names the members that are missing."""
    missing = sorted({step.model_name for step in config.ensemble_steps if members.get(step.member) is None})
    if missing:
        raise invalid_argument(
            f"ensemble {config.name} contains models that are not available or ambiguous: {', '.join(missing)}"
        )


def check_no_cycle(name: str, ensembles: Mapping[str, ModelConfig]) -> None:
    """Check that the ensemble `name` does not contain itself through other ensembles.

    Raises:
        ServeError: INVALID_ARGUMENT with the names along the circle.
    """
    path: list[str] = []
    cleared: set[str] = set()

    def visit(current: str) -> None:
        if current == name and path:
            raise invalid_argument(f"circular dependency between ensembles: {' -> '.join((*path, name))}")
        if current in cleared or current in path or current not in ensembles:
            return
        path.append(current)
        for step in ensembles[current].ensemble_steps:
            visit(step.member)
        cleared.add(path.pop())

    visit(name)


def _ensemble_ends(config: ModelConfig) -> dict[str, _Tensor]:
    batches = config.max_batch_size > 0
    ends: dict[str, _Tensor] = {}
    tensors: tuple[InputConfig | OutputConfig, ...] = (*config.inputs, *config.outputs)
    for tensor in tensors:
        dims = tensor.dims if tensor.reshape is None else tensor.reshape
        ends.setdefault(tensor.name, _Tensor(config.name, tensor.datatype, dims, batches))
    return ends


def _check_inputs(ensemble: str, step: EnsembleStep, member: ModelConfig, tensors: dict[str, _Tensor]) -> None:
    inputs = {tensor.name: tensor for tensor in member.inputs}
    for name, tensor in step.input_map.items():
        if name not in inputs:
            raise invalid_argument(
                f"in ensemble {ensemble}, ensemble tensor {tensor} is mapping to non-existing input {name} in model"
                f" {step.model_name}"
            )
        _merge(ensemble, tensor, inputs[name], step.model_name, member, tensors)
    for name, spec in inputs.items():
        if name not in step.input_map and not spec.optional:
            raise invalid_argument(
                f"in ensemble {ensemble}, input {name} in model {step.model_name} is not mapped to any ensemble tensors"
            )


def _check_outputs(ensemble: str, step: EnsembleStep, member: ModelConfig, tensors: dict[str, _Tensor]) -> None:
    outputs = {tensor.name: tensor for tensor in member.outputs}
    for name, tensor in step.output_map.items():
        if name not in outputs:
            raise invalid_argument(
                f"in ensemble {ensemble}, ensemble tensor {tensor} is mapped from non-existing output {name} in model"
                f" {step.model_name}"
            )
        _merge(ensemble, tensor, outputs[name], step.model_name, member, tensors)


def _merge(
    ensemble: str,
    tensor: str,
    spec: InputConfig | OutputConfig,
    model: str,
    member: ModelConfig,
    tensors: dict[str, _Tensor],
) -> None:
    """Remember what the member declares of the tensor, or compare it with what was declared before."""
    declared = _Tensor(model, spec.datatype, spec.dims, member.max_batch_size > 0)
    known = tensors.setdefault(tensor, declared)
    where = f"in ensemble {ensemble}, ensemble tensor {tensor}: "
    if known.datatype is not declared.datatype:
        raise invalid_argument(
            f"{where}inconsistent data type: {type_name(known.datatype)} is inferred from model {known.model} while"
            f" {type_name(declared.datatype)} is inferred from model {declared.model}"
        )
    # A member that does not batch may stand in an ensemble that does: then its first dimension is the batch.
    if not _agree(known.dims, declared.dims) and not _agree(known.shape, declared.shape):
        raise invalid_argument(
            f"{where}inconsistent shape: {format_shape(known.shape)} is inferred from model {known.model} while"
            f" {format_shape(declared.shape)} is inferred from model {declared.model}"
        )


def _agree(left: Sequence[int], right: Sequence[int]) -> bool:
    return len(left) == len(right) and all(a == b or _VARIABLE in (a, b) for a, b in zip(left, right, strict=True))
