"""A program's tensors under the configuration's names, and with its datatypes and shapes where the file tells none."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rocserve.backends.pytorch.datatypes import datatype_of
from rocserve.backends.pytorch.program import ProgramSignature, ProgramTensor, output_names, outputs_of
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.model_config import InputConfig, ModelConfig, OutputConfig
from rocserve.core.requests import Signature, TensorSpec
from rocserve.core.tensors import Tensor, tensor_from_numpy

_LOG = logging.getLogger(__name__)

_NAMED_PLACE = re.compile(r".*__(\d{1,6})")
"""Triton's INPUT__0, OUTPUT__0, whatever stands before."""

Trial = Callable[[Sequence[Tensor]], Any]
"""Runs the program on inputs in its order; what it returns. Raises: ServeError."""


@dataclass(frozen=True, slots=True)
class BoundProgram:
    signature: Signature
    inputs: tuple[str, ...]
    """The signature's names, in the program's order."""
    outputs: Mapping[str, int]
    """Their places in what the program returns."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of each input the shapes that requests have: the signature's, with the sizes that the configuration fixes."""
    samples: Mapping[str, tuple[int, ...]]
    """Of each input a shape that the program takes; one row where it batches."""

    def zeros(self, rows: int) -> list[Tensor]:
        """Inputs in the program's order."""
        specs = {spec.name: spec for spec in self.signature.inputs}
        tensors = []
        for name in self.inputs:
            shape = self.samples[name]
            if self.signature.supports_batching:
                shape = (rows, *shape[1:])
            zeros = np.zeros(shape, specs[name].datatype.numpy_dtype)
            if specs[name].datatype is DataType.BYTES:
                zeros.fill(b"")
            tensors.append(tensor_from_numpy(name, zeros, specs[name].datatype))
        return tensors


def bind(program: ProgramSignature, config: ModelConfig, trial: Trial) -> BoundProgram:
    """
    Args:
        trial: for what only a run tells.

    Raises:
        ServeError: INVALID_ARGUMENT, the configuration does not say what the file does not say either.
    """
    if program.most_rows is not None and config.max_batch_size > program.most_rows:
        raise invalid_argument(
            f"max_batch_size of model '{config.name}' is {config.max_batch_size}, but its program was exported for at"
            f" most {program.most_rows} rows"
        )
    batches = program.batches if program.outputs is not None else config.max_batch_size > 0
    names = given_names(program.inputs, [entry.name for entry in config.inputs], program.goes_by_order)
    declared = {entry.name: entry for entry in config.inputs}
    inputs = [_input(names[place], tensor, declared, config) for place, tensor in enumerate(program.inputs)]
    shapes = {spec.name: _request_shape(spec, declared.get(spec.name), batches) for spec in inputs}
    samples = {
        spec.name: _sample(shapes[spec.name], tensor.sample or spec.shape, batches)
        for spec, tensor in zip(inputs, program.inputs, strict=True)
    }
    signature = Signature(tuple(inputs), (), batches)
    bound = BoundProgram(signature, tuple(spec.name for spec in inputs), {}, shapes, samples)
    tensors = program.outputs if program.outputs is not None else _tried_outputs(bound, config, trial)
    given = given_names(tensors, [entry.name for entry in config.outputs], program.outputs is None)
    outputs = [_spec(name, tensor) for name, tensor in zip(given, tensors, strict=True)]
    if program.outputs is None:
        by_name = {entry.name: entry for entry in config.outputs}
        outputs = [_open_sizes(spec, by_name.get(spec.name), batches) for spec in outputs]
    signature = Signature(tuple(inputs), tuple(outputs), batches, max_batch_size=program.most_rows)
    return replace(bound, signature=signature, outputs={name: place for place, name in enumerate(given)})


def given_names(tensors: Sequence[ProgramTensor], configured: Sequence[str], goes_by_order: bool = False) -> list[str]:
    """What each is called, in the program's order: as the configuration has it, where it can be told which it means."""
    names = [tensor.names[0] for tensor in tensors]
    by_name = {alias: place for place, tensor in enumerate(tensors) for alias in tensor.names}
    places = [by_name.get(name, _named_place(name)) for name in configured]
    if any(place < 0 or place >= len(tensors) for place in places) or len(set(places)) < len(places):
        if not goes_by_order or len(configured) > len(tensors):
            return names
        places = list(range(len(configured)))
    for name, place in zip(configured, places, strict=True):
        names[place] = name
    return names


def _named_place(name: str) -> int:
    """-1: it names none."""
    found = _NAMED_PLACE.fullmatch(name)
    return int(found[1]) if found else -1


def _input(name: str, tensor: ProgramTensor, declared: Mapping[str, InputConfig], config: ModelConfig) -> TensorSpec:
    if tensor.datatype is not None:
        return _spec(name, tensor)
    entry = declared.get(name)
    if entry is None:
        raise invalid_argument(
            f"the file of model '{config.name}' does not tell datatypes and shapes of its inputs: config.pbtxt has to"
            f" say of each input its name, data_type and dims; missing: {' or '.join(tensor.names)}"
        )
    return TensorSpec(name, entry.datatype, _own_shape(entry, config.max_batch_size > 0))


def _spec(name: str, tensor: ProgramTensor) -> TensorSpec:
    assert tensor.datatype is not None and tensor.shape is not None, "what the file does not say has been tried"
    return TensorSpec(name, tensor.datatype, tensor.shape)


def _own_shape(entry: InputConfig | OutputConfig, batches: bool) -> tuple[int, ...]:
    """The shape that the model itself sees."""
    dims = entry.dims if entry.reshape is None else entry.reshape
    return (-1, *dims) if batches else dims


def _request_shape(spec: TensorSpec, declared: InputConfig | None, batches: bool) -> tuple[int, ...]:
    own = spec.shape if declared is None else _own_shape(declared, batches)
    return own if len(own) == len(spec.shape) else spec.shape


def _sample(shape: tuple[int, ...], known: tuple[int, ...], batches: bool) -> tuple[int, ...]:
    """The example's sizes, but those that are fixed; 1 for what nobody says."""
    sizes = [theirs if own == -1 else own for own, theirs in zip(shape, known, strict=True)]
    if batches:
        sizes[0] = 1
    return tuple(1 if size == -1 else size for size in sizes)


def _tried_outputs(bound: BoundProgram, config: ModelConfig, trial: Trial) -> tuple[ProgramTensor, ...]:
    """As a run with zeros gives them; which of their sizes vary, the configuration has to say."""
    batches = bound.signature.supports_batching
    try:
        result = trial(bound.zeros(1))
    except ServeError as error:
        if not config.outputs:
            raise invalid_argument(
                f"config.pbtxt of model '{config.name}' names no outputs, and a run with zeros, which would tell them,"
                f" fails: {error.text}; name each output with its data_type and dims"
            ) from error
        _LOG.info(
            "model '%s' does not take zeros, and its outputs are not known before requests: %s", config.name, error
        )
        own = [(entry, _own_shape(entry, batches)) for entry in config.outputs]
        return tuple(ProgramTensor((entry.name,), entry.datatype, shape) for entry, shape in own)
    found: list[ProgramTensor] = []
    for names, value in zip(output_names(result), outputs_of(result), strict=True):
        is_tensor = isinstance(value, torch.Tensor)
        datatype = datatype_of(value.dtype, f"output '{names[0]}'") if is_tensor else DataType.BYTES
        shape = tuple(value.shape) if is_tensor else (len(value),)
        found.append(ProgramTensor(names, datatype, (-1, *shape[1:]) if batches else shape))
    return tuple(found)


def _open_sizes(spec: TensorSpec, entry: OutputConfig | None, batches: bool) -> TensorSpec:
    """-1 where the configuration says so, of an output that was tried with one shape."""
    declared = () if entry is None else _own_shape(entry, batches)
    if len(declared) != len(spec.shape):
        return spec
    return replace(spec, shape=tuple(-1 if own == -1 else size for own, size in zip(declared, spec.shape, strict=True)))
