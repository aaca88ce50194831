"""Matches a program's tensors with the configuration, and fills in the datatypes and shapes that the file lacks."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rocserve.backends.pytorch.datatypes import datatype_of
from rocserve.backends.pytorch.program import Program, ProgramTensor, output_names, outputs_of
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, invalid_argument, unavailable
from rocserve.core.model_config import InputConfig, ModelConfig, OutputConfig
from rocserve.core.requests import Signature, TensorSpec
from rocserve.core.tensors import Tensor, tensor_from_numpy

_LOG = logging.getLogger(__name__)

_NUMBERED = re.compile(r".*__(\d{1,6})")
"""Triton's INPUT__0 and OUTPUT__0, with any word before the underscores."""

Trial = Callable[[Sequence[Tensor]], Any]
"""Runs the program on inputs in the program's order, and returns the result. Raises ServeError if the run fails."""


@dataclass(frozen=True, slots=True)
class BoundProgram:
    signature: Signature
    inputs: tuple[TensorSpec, ...]
    """The signature's inputs in the program's order, with the sizes that the configuration fixes."""
    samples: tuple[tuple[int, ...], ...]
    """For each input a shape that the program takes, with one row if the program batches."""
    outputs: Mapping[str, int]
    """Output name -> position in the program's result."""

    def zeros(self, rows: int) -> list[Tensor]:
        """Make zeros or empty strings for each input. Raises ServeError (UNAVAILABLE) if memory does not suffice."""
        tensors = []
        for spec, shape in zip(self.inputs, self.samples, strict=True):
            if self.signature.supports_batching:
                shape = (rows, *shape[1:])
            try:
                zeros = np.zeros(shape, spec.datatype.numpy_dtype)
            except (MemoryError, ValueError) as error:  # numpy raises ValueError if the size overflows its integers.
                raise unavailable(f"memory does not suffice for input '{spec.name}' of zeros: {error}") from None
            if spec.datatype is DataType.BYTES:
                zeros.fill(b"")
            tensors.append(tensor_from_numpy(spec.name, zeros, spec.datatype))
        return tensors


def bind(program: Program, config: ModelConfig, trial: Trial) -> BoundProgram:
    """Match a program with the configuration. `trial` finds the outputs if the file does not describe them. Raises
    ServeError (INVALID_ARGUMENT) if neither the configuration nor the file gives a tensor's datatype or shape, or if
    the program does not take such inputs."""
    file = program.signature
    if file.most_rows is not None and config.max_batch_size > file.most_rows:
        raise invalid_argument(
            f"max_batch_size of model '{config.name}' is {config.max_batch_size}, but its program was exported for at"
            f" most {file.most_rows} rows"
        )
    batches = file.batches if file.outputs is not None else config.max_batch_size > 0
    declared = {entry.name: entry for entry in config.inputs}
    inputs: list[TensorSpec] = []
    requested: list[TensorSpec] = []
    for name, tensor in zip(given_names(file.inputs, [*declared], file.by_position), file.inputs, strict=True):
        entry = declared.get(name)
        own = None if entry is None else _model_shape(entry, batches)
        if tensor.datatype is not None:
            spec = _spec(name, tensor)
        elif entry is not None:
            spec = TensorSpec(name, entry.datatype, _model_shape(entry, batches))
        else:
            raise invalid_argument(
                f"the file of model '{config.name}' does not tell datatypes and shapes of its inputs: config.pbtxt has"
                f" to say of each input its name, data_type and dims; missing: {' or '.join(tensor.names)}"
            )
        inputs.append(spec)
        requested.append(spec if own is None or len(own) != len(spec.shape) else replace(spec, shape=own))
    if program.check is not None:
        is_single = batches and config.max_batch_size == 1
        program.check(
            [replace(spec, shape=(1, *spec.shape[1:])) for spec in requested] if is_single else requested, batches
        )
    samples = [
        _sample(spec.shape, tensor.sample or spec.shape, batches)
        for spec, tensor in zip(requested, file.inputs, strict=True)
    ]
    signature = Signature(tuple(inputs), (), batches, max_batch_size=file.most_rows)
    bound = BoundProgram(signature, tuple(requested), tuple(samples), {})
    tensors = file.outputs if file.outputs is not None else _outputs_of_trial(bound, config, trial)
    names = given_names(tensors, [entry.name for entry in config.outputs], file.outputs is None)
    outputs = [_spec(name, tensor) for name, tensor in zip(names, tensors, strict=True)]
    if file.outputs is None:
        by_name = {entry.name: entry for entry in config.outputs}
        outputs = [_with_open_sizes(spec, by_name.get(spec.name), batches) for spec in outputs]
    return replace(
        bound,
        signature=replace(signature, outputs=tuple(outputs)),
        outputs={name: index for index, name in enumerate(names)},
    )


def given_names(tensors: Sequence[ProgramTensor], configured: Sequence[str], by_position: bool = False) -> list[str]:
    """Return the tensors' names in the program's order: configured names replace the program's if each matches a
    different tensor. Otherwise `by_position` matches them in order."""
    names = [tensor.names[0] for tensor in tensors]
    by_name = {alias: index for index, tensor in enumerate(tensors) for alias in tensor.names}
    # A first name takes precedence over another tensor's alias.
    by_name.update({name: index for index, name in enumerate(names)})
    indices: list[int] = []
    for name in configured:
        numbered = _NUMBERED.fullmatch(name)
        indices.append(by_name.get(name, int(numbered[1]) if numbered else -1))
    if any(index < 0 or index >= len(tensors) for index in indices) or len(set(indices)) < len(indices):
        if not by_position or len(configured) > len(tensors):
            return names
        indices = list(range(len(configured)))
    for name, index in zip(configured, indices, strict=True):
        names[index] = name
    return names


def _spec(name: str, tensor: ProgramTensor) -> TensorSpec:
    assert tensor.datatype is not None and tensor.shape is not None, "a trial has found those that the file lacks"
    return TensorSpec(name, tensor.datatype, tensor.shape)


def _model_shape(entry: InputConfig | OutputConfig, batches: bool) -> tuple[int, ...]:
    """Return the shape of an input or output as the model itself sees it; -1 = the batch, or a size that varies."""
    return (-1, *entry.model_dims) if batches else entry.model_dims


def _sample(shape: tuple[int, ...], known: tuple[int, ...], batches: bool) -> tuple[int, ...]:
    """Replace varying sizes by the known sizes, and the batch and unknown sizes by 1."""
    sizes = [theirs if own == -1 else own for own, theirs in zip(shape, known, strict=True)]
    if batches:
        sizes[0] = 1
    return tuple(1 if size == -1 else size for size in sizes)


def _outputs_of_trial(bound: BoundProgram, config: ModelConfig, trial: Trial) -> tuple[ProgramTensor, ...]:
    """Return the outputs of a run with zeros; if the run fails, the configured outputs. A size varies if it is 0, or if
    a second run with larger inputs gives another size. Raises ServeError (INVALID_ARGUMENT) if the run fails and no
    outputs are configured, or if an output does not have the batch's rows."""
    batches = bound.signature.supports_batching
    try:
        result = trial(bound.zeros(1))
    except ServeError as error:
        if not config.outputs:
            raise invalid_argument(
                f"config.pbtxt of model '{config.name}' names no outputs, and a run with zeros, which would tell them,"
                f" fails: {error.text}; name each output with its data_type and dims"
            ) from None
        _LOG.info(
            "model '%s' does not take zeros, and its outputs are not known before requests: %s", config.name, error
        )
        own = [(entry, _model_shape(entry, batches)) for entry in config.outputs]
        return tuple(ProgramTensor((entry.name,), entry.datatype, shape) for entry, shape in own)
    again = result
    first = 1 if batches else 0
    larger = tuple(
        tuple(
            size + (own == -1 and index >= first)
            for index, (own, size) in enumerate(zip(spec.shape, shape, strict=True))
        )
        for spec, shape in zip(bound.inputs, bound.samples, strict=True)
    )
    if larger != bound.samples:
        with suppress(ServeError):
            again = trial(replace(bound, samples=larger).zeros(1))
    others = [_shape_of(value) for value in outputs_of(again)]
    found: list[ProgramTensor] = []
    for index, (names, value) in enumerate(zip(output_names(result), outputs_of(result), strict=True)):
        is_tensor = isinstance(value, torch.Tensor)
        datatype = datatype_of(value.dtype, f"output '{names[0]}'") if is_tensor else DataType.BYTES
        shape = _shape_of(value)
        if batches and (not shape or shape[0] > 1):
            raise invalid_argument(
                f"output '{names[0]}' of model '{config.name}' has the shape {list(shape)} where the program is given"
                " one row, so it does not batch; leave max_batch_size out"
            )
        if batches:
            shape = (-1, *shape[1:])
        if index < len(others) and len(others[index]) == len(shape):
            # A size of 0 counts as varying, because many detectors find nothing in zeros.
            shape = tuple(size if size == other > 0 else -1 for size, other in zip(shape, others[index], strict=True))
        found.append(ProgramTensor(names, datatype, shape))
    return tuple(found)


def _shape_of(output: Any) -> tuple[int, ...]:
    """Return the shape of a tensor or of a list of str."""
    return tuple(output.shape) if isinstance(output, torch.Tensor) else (len(output),)


def _with_open_sizes(spec: TensorSpec, entry: OutputConfig | None, batches: bool) -> TensorSpec:
    """Set the sizes of an output that a trial found to -1 if the configuration has -1 there."""
    declared = () if entry is None else _model_shape(entry, batches)
    if len(declared) != len(spec.shape):
        return spec
    return replace(spec, shape=tuple(-1 if own == -1 else size for own, size in zip(declared, spec.shape, strict=True)))
