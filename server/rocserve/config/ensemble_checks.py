"""Checks ensembles: each by itself, that every tensor is written, read and reachable; and against its members, that
every map names real tensors, and that datatypes, shapes and batch sizes agree.

Rules and words are Triton's (its model_config_utils and ensemble_utils).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from rocserve.config.datatypes import type_name
from rocserve.core.datatypes import DataType
from rocserve.core.errors import invalid_argument
from rocserve.core.model_config import EnsembleStep, InputConfig, OutputConfig
from rocserve.core.model_config import ModelConfig as PlainConfig
from rocserve.core.validation import format_shape
from rocserve.protocol.model_config_pb2 import ModelConfig


@dataclass(slots=True)
class _Node:
    is_output: bool = False
    """Whether a step writes it."""
    ready: bool = False
    reads: list[str] = field(default_factory=list)
    """The tensors that the step which writes it reads."""
    feeds: list[str] = field(default_factory=list)
    """The tensors that the steps which read it write."""


def check_ensemble_scheduling(message: ModelConfig) -> None:
    """Raises: ServeError INVALID_ARGUMENT with the first fault of the ensemble's own configuration."""
    name = message.name
    if message.instance_group:
        raise invalid_argument(f"instance group should not be specified for ensemble '{name}'")
    if message.HasField("optimization"):
        raise invalid_argument(f"optimization should not be specified for ensemble '{name}'")
    if not message.ensemble_scheduling.step:
        raise invalid_argument(f"must specify 'step' for ensemble '{name}'")
    tensors = _build_graph(message)
    _mark_ready(message, tensors)
    for output in message.output:
        _check_output(output.name, message, tensors)
    outputs = {output.name for output in message.output}
    for tensor_name, tensor in tensors.items():
        if tensor_name not in outputs and (not tensor.ready or not tensor.feeds):
            raise invalid_argument(f"ensemble tensor '{tensor_name}' is unused in ensemble '{name}'")


def _build_graph(message: ModelConfig) -> dict[str, _Node]:
    tensors: dict[str, _Node] = {}
    for index, step in enumerate(message.ensemble_scheduling.step):
        for what, given in (
            ("model_name", step.model_name),
            ("input_map", step.input_map),
            ("output_map", step.output_map),
        ):
            if not given:
                raise invalid_argument(f"must specify '{what}' in step {index} of ensemble '{message.name}'")
        for written in step.output_map.values():
            tensor = tensors.setdefault(written, _Node())
            if tensor.is_output:
                raise invalid_argument(
                    f"ensemble tensor '{written}' can appear in an output map only once for ensemble"
                    f" '{message.name}' step {index}"
                )
            tensor.is_output = True
        for read in step.input_map.values():
            source = tensors.setdefault(read, _Node())
            for written in step.output_map.values():
                tensors[written].reads.append(read)
                source.feeds.append(written)
    return tensors


def _mark_ready(message: ModelConfig, tensors: dict[str, _Node]) -> None:
    pending: list[str] = []
    for ensemble_input in message.input:
        if ensemble_input.name not in tensors:
            raise invalid_argument(f"ensemble input '{ensemble_input.name}' for ensemble {message.name}' is not used")
        tensors[ensemble_input.name].ready = True
        pending.append(ensemble_input.name)
    while pending:
        for name in tensors[pending.pop()].feeds:
            tensor = tensors[name]
            if not tensor.ready and all(tensors[read].ready for read in tensor.reads):
                tensor.ready = True
                pending.append(name)


def _check_output(name: str, message: ModelConfig, tensors: dict[str, _Node]) -> None:
    if name not in tensors:
        raise invalid_argument(f"ensemble output '{name}' for ensemble {message.name}' is not used")
    if tensors[name].ready:
        return
    text = f"output '{name}' for ensemble '{message.name}' is not written"
    # The furthest tensor up the graph that keeps it from being ready; cycles end the search.
    source = name
    seen: set[str] = set()
    while unready := [read for read in tensors[source].reads if not tensors[read].ready and read not in seen]:
        source = unready[0]
        seen.add(source)
    if source != name:
        text += f": at least one of its depending tensors, '{source}', is not connected"
    raise invalid_argument(text)


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


def check_ensemble(config: PlainConfig, members: Mapping[str, PlainConfig | None]) -> bool:
    """Check a complete ensemble against its complete members; whether it is decoupled, as a member of it is. `members`:
    by what the steps find them by; None, or no entry, for one that is not available. Raises: ServeError:
    INVALID_ARGUMENT with the first fault, in Triton's words."""
    missing = sorted({step.model_name for step in config.ensemble_steps if members.get(step.member) is None})
    if missing:
        raise invalid_argument(
            f"ensemble {config.name} contains models that are not available or ambiguous: {', '.join(missing)}"
        )
    tensors: dict[str, _Tensor] = {}
    ends: tuple[InputConfig | OutputConfig, ...] = (*config.inputs, *config.outputs)
    for tensor in ends:
        dims = tensor.dims if tensor.reshape is None else tensor.reshape
        tensors.setdefault(tensor.name, _Tensor(config.name, tensor.datatype, dims, config.max_batch_size > 0))
    for step in config.ensemble_steps:
        member = members[step.member]
        assert member is not None
        if member.max_batch_size != 0 and member.max_batch_size < config.max_batch_size:
            raise invalid_argument(
                f"ensemble {config.name} allows maximum batch size {config.max_batch_size}, but it contains model"
                f" {step.model_name} which only allows maximum batch size to be {member.max_batch_size}"
            )
        inputs = {entry.name: entry for entry in member.inputs}
        _check_mapped(config.name, step, step.input_map, "mapping to non-existing input", inputs, member, tensors)
        for name, entry in inputs.items():
            if name not in step.input_map and not entry.optional:
                raise invalid_argument(
                    f"in ensemble {config.name}, input {name} in model {step.model_name} is not mapped to any ensemble"
                    " tensors"
                )
        outputs = {entry.name: entry for entry in member.outputs}
        _check_mapped(config.name, step, step.output_map, "mapped from non-existing output", outputs, member, tensors)
    return _check_streams(config, {name for name, member in members.items() if member is not None and member.decoupled})


def _check_streams(config: PlainConfig, decoupled: Set[str]) -> bool:
    """Whether answers of a decoupled member flow through the ensemble. Each of its answers is a stream element; a step
    cannot join elements of different streams. Raises: ServeError."""
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


def check_no_cycle(name: str, ensembles: Mapping[str, PlainConfig]) -> None:
    """Check that the ensemble `name` does not contain itself through other ensembles. Raises: ServeError:
    INVALID_ARGUMENT with the names along the circle."""
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


def _check_mapped(
    ensemble: str,
    step: EnsembleStep,
    mapped: Mapping[str, str],
    missing: str,
    specs: Mapping[str, InputConfig] | Mapping[str, OutputConfig],
    member: PlainConfig,
    tensors: dict[str, _Tensor],
) -> None:
    """Remember what the member declares of the tensors, or compare it with what was declared before. `missing`: in the
    error of a tensor that is mapped where the member has none."""
    model = step.model_name
    for name, tensor in mapped.items():
        if name not in specs:
            raise invalid_argument(
                f"in ensemble {ensemble}, ensemble tensor {tensor} is {missing} {name} in model {model}"
            )
        declared = _Tensor(model, specs[name].datatype, specs[name].dims, member.max_batch_size > 0)
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
