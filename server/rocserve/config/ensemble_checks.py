"""Checks of ensembles: alone, that every tensor is written, read and reachable; with the members, that every mapped
tensor exists and that datatypes, shapes and batch sizes agree. Rules and texts: Triton's model_config_utils and
ensemble_utils."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from rocserve.config.datatypes import type_name
from rocserve.core.datatypes import DataType
from rocserve.core.errors import invalid_argument
from rocserve.core.model_config import EnsembleStep, InputConfig, OutputConfig
from rocserve.core.model_config import ModelConfig as PlainConfig
from rocserve.core.model_names import ModelKey
from rocserve.core.printable import names_hint
from rocserve.core.validation import format_shape
from rocserve.protocol.model_config_pb2 import ModelConfig, ModelEnsembling


def ensemble_faults(message: ModelConfig) -> Iterator[str]:
    """Yield an ensemble's faults. The caller must stop at the first: each check relies on the earlier ones."""
    name, steps = message.name, message.ensemble_scheduling.step
    if message.instance_group:
        yield f"instance group should not be specified for ensemble '{name}'"
    if message.HasField("optimization"):
        yield f"optimization should not be specified for ensemble '{name}'"
    if not steps:
        yield f"must specify 'step' for ensemble '{name}'"
    # For each tensor that a step writes: the tensors that the step reads.
    sources: dict[str, Sequence[str]] = {}
    for index, step in enumerate(steps):
        for field in ("model_name", "input_map", "output_map"):
            if not getattr(step, field):
                yield f"must specify '{field}' in step {index} of ensemble '{name}'"
        given = tuple(step.input_map.values())
        for written in step.output_map.values():
            if written in sources:
                yield (
                    f"ensemble tensor '{written}' can appear in an output map only once for ensemble '{name}' step"
                    f" {index}"
                )
            sources[written] = given
    read = {tensor for step in steps for tensor in step.input_map.values()}
    ready = {tensor.name for tensor in message.input}
    for tensor in message.input:
        if tensor.name not in read and tensor.name not in sources:
            hint = names_hint("nothing writes what a step reads", tensor.name, read - sources.keys() - ready)
            yield f"ensemble input '{tensor.name}' for ensemble {name}' is not used{hint}"
    ready.update(*(steps[place].output_map.values() for place in _order(steps, ready)))
    outputs = {output.name for output in message.output}
    for output in message.output:
        if output.name not in read and output.name not in sources:
            hint = names_hint("nothing reads what a step writes", output.name, sources.keys() - read - outputs)
            yield f"ensemble output '{output.name}' for ensemble {name}' is not used{hint}"
        if output.name not in ready:
            yield _not_written(output.name, name, sources, ready)
    for entry in (tensor for step in steps for tensor in (*step.output_map.values(), *step.input_map.values())):
        if entry not in outputs and (entry not in ready or entry not in read):
            yield f"ensemble tensor '{entry}' is unused in ensemble '{name}'"


def _order(steps: Sequence[EnsembleStep | ModelEnsembling.Step], given: Iterable[str]) -> list[int]:
    """Return the indices of the steps that can run, in an order of running. `given`: the request's tensors."""
    readers: defaultdict[str, list[int]] = defaultdict(list)
    missing = []
    for place, step in enumerate(steps):
        reads = set(step.input_map.values())
        missing.append(len(reads))
        for tensor in reads:
            readers[tensor].append(place)
    order: list[int] = []
    found = fresh = set(given)
    while fresh:
        can_run = []
        for place in (place for tensor in fresh for place in readers[tensor]):
            missing[place] -= 1
            if not missing[place]:
                can_run.append(place)
        order += sorted(can_run)
        fresh = {tensor for place in can_run for tensor in steps[place].output_map.values()} - found
        found = found | fresh
    return order


def _not_written(output: str, ensemble: str, sources: Mapping[str, Sequence[str]], ready: Set[str]) -> str:
    """Return the error, with the furthest unready tensor on the way to the output. A cycle ends the search."""
    source = output
    seen: set[str] = set()
    while unready := [read for read in sources.get(source, ()) if read not in ready and read not in seen]:
        source = unready[0]
        seen.add(source)
    text = f"output '{output}' for ensemble '{ensemble}' is not written"
    if source == output:
        return text
    return f"{text}: at least one of its depending tensors, '{source}', is not connected"


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of the ensemble, and the model that declared its datatype and shape first."""

    model: str
    datatype: DataType
    dims: tuple[int, ...]
    batches: bool
    any_rank: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return (-1, *self.dims) if self.batches else self.dims


def check_ensemble(config: PlainConfig, members: Mapping[ModelKey, PlainConfig | None]) -> bool:
    """Check a complete ensemble against its complete members. Returns whether the ensemble is decoupled because a
    member is. `members`: key of a step's member -> configuration; None or missing = not available. Raises ServeError
    (INVALID_ARGUMENT) with the first fault, in Triton's words."""
    missing = sorted({step.model_name for step in config.ensemble_steps if members.get(step.member) is None})
    if missing:
        raise invalid_argument(
            f"ensemble {config.name} contains models that are not available or ambiguous: {', '.join(missing)}"
        )
    tensors: dict[str, _Tensor] = {}
    ends: tuple[InputConfig | OutputConfig, ...] = (*config.inputs, *config.outputs)
    for tensor in ends:
        own = _Tensor(config.name, tensor.datatype, tensor.model_dims, config.max_batch_size > 0, tensor.any_rank)
        tensors.setdefault(tensor.name, own)
    for step in config.ensemble_steps:
        member = members[step.member]
        assert member is not None
        if member.max_batch_size != 0 and member.max_batch_size < config.max_batch_size:
            raise invalid_argument(
                f"ensemble {config.name} allows maximum batch size {config.max_batch_size}, but it contains model"
                f" {step.model_name} which only allows maximum batch size to be {member.max_batch_size}"
            )
        for name, declared in _declarations(config.name, step, member):
            known = tensors.setdefault(name, declared)
            where = f"in ensemble {config.name}, ensemble tensor {name}: "
            if known.datatype is not declared.datatype:
                raise invalid_argument(
                    f"{where}inconsistent data type: {type_name(known.datatype)} is inferred from model {known.model}"
                    f" while {type_name(declared.datatype)} is inferred from model {declared.model}"
                )
            # A member that does not batch fits a batching ensemble if its first dimension is the batch.
            fits = _agree(known.dims, declared.dims) or _agree(known.shape, declared.shape)
            if not (fits or known.any_rank or declared.any_rank):
                raise invalid_argument(
                    f"{where}inconsistent shape: {format_shape(known.shape)} is inferred from model {known.model} while"
                    f" {format_shape(declared.shape)} is inferred from model {declared.model}"
                )
    return _check_streams(config, {name for name, member in members.items() if member is not None and member.decoupled})


def _declarations(ensemble: str, step: EnsembleStep, member: PlainConfig) -> Iterator[tuple[str, _Tensor]]:
    """Yield the member's declarations of the ensemble's tensors. Raises ServeError (INVALID_ARGUMENT) if the member
    lacks a mapped tensor, or the step lacks a required input."""
    ends: tuple[tuple[Mapping[str, str], str, tuple[InputConfig | OutputConfig, ...]], ...] = (
        (step.input_map, "mapping to non-existing input", member.inputs),
        (step.output_map, "mapped from non-existing output", member.outputs),
    )
    for mapped, missing, entries in ends:
        specs = {entry.name: entry for entry in entries}
        for name, tensor in mapped.items():
            if name not in specs:
                raise invalid_argument(
                    f"in ensemble {ensemble}, ensemble tensor {tensor} is {missing} {name} in model {step.model_name}"
                )
            spec = specs[name]
            yield tensor, _Tensor(step.model_name, spec.datatype, spec.dims, member.max_batch_size > 0, spec.any_rank)
        for entry in member.inputs:
            if entry.name not in step.input_map and not entry.optional:
                raise invalid_argument(
                    f"in ensemble {ensemble}, input {entry.name} in model {step.model_name} is not mapped to any"
                    " ensemble tensors"
                )


def _check_streams(config: PlainConfig, decoupled: Set[str]) -> bool:
    """Return whether responses of a decoupled member reach the ensemble's outputs. Each response is an element of a
    stream, and a step cannot join elements of different streams. Raises ServeError (INVALID_ARGUMENT)."""
    streams = {tensor.name: 0 for tensor in config.inputs}
    for place in _order(config.ensemble_steps, streams):
        step = config.ensemble_steps[place]
        sources = {streams[name] for name in step.input_map.values()}
        if len(sources) > 1:
            # Triton names the ensemble instead of the step's model.
            raise invalid_argument(
                f"in ensemble {config.name}, step of model '{config.name}' receives inputs originated from"
                f" different decoupled models; it is the step of '{step.model_name}'"
            )
        stream = place + 1 if step.member in decoupled else next(iter(sources), 0)
        streams.update(dict.fromkeys(step.output_map.values(), stream))
    return any(streams.values())


def check_no_cycle(key: ModelKey, ensembles: Mapping[ModelKey, PlainConfig]) -> None:
    """Check that an ensemble does not contain itself. Raises ServeError (INVALID_ARGUMENT) with the cycle."""
    waiting = [key] if key in ensembles else []
    found_in: dict[ModelKey, ModelKey] = {}
    while waiting:
        outer = waiting.pop()
        for step in ensembles[outer].ensemble_steps:
            if step.member == key:
                path = [key, outer]
                while path[-1] != key:
                    path.append(found_in[path[-1]])
                names = " -> ".join(ensembles[one].name for one in reversed(path))
                raise invalid_argument(f"circular dependency between ensembles: {names}")
            if step.member in ensembles and step.member not in found_in:
                found_in[step.member] = outer
                waiting.append(step.member)


def _agree(left: Sequence[int], right: Sequence[int]) -> bool:
    return len(left) == len(right) and all(a == b or -1 in (a, b) for a, b in zip(left, right, strict=True))
