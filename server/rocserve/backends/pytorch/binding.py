"""Matches a program's tensors with the configuration, and fills in the datatypes and shapes that the file lacks."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rocserve.backends.dropped_sizes import with_dropped_sizes
from rocserve.backends.pytorch.datatypes import datatype_of
from rocserve.backends.pytorch.program import Program, ProgramTensor, UnfitPrecision
from rocserve.backends.pytorch.results import (
    NUMBERED,
    Part,
    Path,
    direct_path,
    has_value,
    outputs_of,
    parts_of,
    path_named,
    value_at,
)
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, invalid_argument, unavailable
from rocserve.core.model_config import InputConfig, ModelConfig, OutputConfig
from rocserve.core.padding import NO_PADDING, Buckets, Lengths, Padding
from rocserve.core.requests import Signature, TensorSpec
from rocserve.core.tensors import Tensor, tensor_from_numpy

_LOG = logging.getLogger(__name__)

Shapes = tuple[tuple[int, ...], ...]
Trial = Callable[[Sequence[Tensor]], Any]
"""Runs the program on inputs in the program's order, and returns the result. Raises ServeError if the run fails."""


def no_trial(inputs: Sequence[Any]) -> Any:
    """Stand in for the Trial of a program whose file describes its outputs, which needs none."""
    raise AssertionError("a program of torch.export describes its outputs")


@dataclass(frozen=True, slots=True)
class BoundProgram:
    signature: Signature
    inputs: tuple[TensorSpec, ...]
    """The signature's inputs in the program's order, with the sizes that the configuration fixes."""
    samples: Shapes
    """For each input a shape that the program takes, with one row if the program batches."""
    outputs: Mapping[str, int]
    """Output name -> position among the values of `outputs_in`."""
    paths: tuple[Path, ...] | None = None
    """For each output where it is in a result; None = not known, or the file describes the outputs, in order."""
    is_described: bool = True
    """Whether the file describes the outputs."""

    def outputs_in(self, result: Any) -> list[Any]:
        """Return the outputs in a result of the program, in the order of `outputs`; None = the result lacks it."""
        if self.is_described:
            return outputs_of(result)
        paths = self.paths
        if paths is None:
            paths = tuple(direct_path(name, position, result) for position, name in enumerate(self.outputs))
        return [value_at(result, path) for path in paths]

    def zeros(self, rows: int, lengths: Lengths = (), padding: Padding = NO_PADDING) -> list[Tensor]:
        """Make zeros or empty strings for each input. `lengths`: of the dimensions of `padding`; one may be the
        first. Raises ServeError (UNAVAILABLE) if memory does not suffice."""
        tensors, buckets = [], Buckets(padding)
        for spec, sample in zip(self.inputs, self.samples, strict=True):
            shape = (rows, *sample[1:]) if self.signature.supports_batching else sample
            shape = buckets.padded_shape(spec.name, shape, lengths)
            try:
                zeros = np.zeros(shape, spec.datatype.numpy_dtype)
            except (MemoryError, ValueError) as error:  # numpy raises ValueError if the size overflows its integers.
                raise unavailable(f"not enough memory for zeros as input '{spec.name}': {error}") from None
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
                f"the file of model '{config.name}' has no datatypes and shapes of its inputs: give each input's name,"
                f' data_type and dims in config.pbtxt, as in input {{ name: "{tensor.names[0]}" data_type: TYPE_FP32'
                f" dims: [ 8 ] }}; missing: {' or '.join(tensor.names)}{_other_names(declared)}"
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
    if file.outputs is None:
        return _bind_results(bound, config, trial)
    names = given_names(file.outputs, [entry.name for entry in config.outputs])
    return replace(
        bound,
        signature=replace(signature, outputs=tuple(map(_spec, names, file.outputs))),
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
        numbered = NUMBERED.fullmatch(name)
        indices.append(by_name.get(name, int(numbered[1]) if numbered else -1))
    if any(index < 0 or index >= len(tensors) for index in indices) or len(set(indices)) < len(indices):
        if not by_position or len(configured) > len(tensors):
            return names
        indices = list(range(len(configured)))
    for name, index in zip(configured, indices, strict=True):
        names[index] = name
    return names


def _other_names(declared: Iterable[str]) -> str:
    """Return the part of an error text with the names that the configuration has instead."""
    names = ", ".join(f"'{name}'" for name in declared)
    return f"; it has {names}" if names else ""


def _spec(name: str, tensor: ProgramTensor) -> TensorSpec:
    assert tensor.datatype is not None and tensor.shape is not None, "a trial has found those that the file lacks"
    return TensorSpec(name, tensor.datatype, tensor.shape)


def _configured_spec(entry: OutputConfig, batches: bool) -> TensorSpec:
    return TensorSpec(entry.name, entry.datatype, _model_shape(entry, batches))


def _model_shape(entry: InputConfig | OutputConfig, batches: bool) -> tuple[int, ...]:
    """Return the shape of an input or output as the model itself sees it; -1 = the batch, or a size that varies."""
    return (-1, *entry.model_dims) if batches else entry.model_dims


def _sample(shape: tuple[int, ...], known: tuple[int, ...], batches: bool) -> tuple[int, ...]:
    """Replace varying sizes by the known sizes, and the batch and unknown sizes by 1."""
    sizes = [theirs if own == -1 else own for own, theirs in zip(shape, known, strict=True)]
    if batches:
        sizes[0] = 1
    return tuple(1 if size == -1 else size for size in sizes)


def _bind_results(bound: BoundProgram, config: ModelConfig, trial: Trial) -> BoundProgram:
    """Add the outputs that runs with zeros show; if all of them fail, the configured outputs. Raises ServeError
    (INVALID_ARGUMENT) if they fail and no outputs are configured, or if an output does not have the batch's rows."""
    batches = bound.signature.supports_batching
    by_name = {entry.name: entry for entry in config.outputs}
    runs, reason = _runs(bound, trial)
    if not runs:
        if not config.outputs:
            raise invalid_argument(
                f"config.pbtxt of model '{config.name}' names no outputs, and a run with zeros, which would show them,"
                f" fails: {reason}; name each output with its data_type and dims"
            )
        _LOG.debug(
            "model '%s' does not take zeros, and its outputs are not known before requests: %s", config.name, reason
        )
        specs = [_configured_spec(entry, batches) for entry in config.outputs]
        return _with_results(bound, specs, None)
    samples, result = runs[0]
    parts = parts_of(result)
    has = ", ".join(f"'{part.names[0]}'" for part in parts) or "no outputs"
    known = {name for part in parts for name in part.names}
    for name in by_name:
        if name not in known and (path := path_named(name, result)) is not None:
            _LOG.warning(
                "output '%s' of model '%s' is not in the program's result for zeros, which has %s: requests without it"
                " in their results fail", name, config.name, has,
            )  # fmt: skip
            parts.append(Part((name,), path, None))
    specs, paths = [], []
    names = given_names([ProgramTensor(part.names) for part in parts], [*by_name], by_position=True)
    for name, part in zip(names, parts, strict=True):
        entry = by_name.get(name)
        if has_value(part.value):
            values = [value_at(other, part.path) for _, other in runs]
            specs.append(_found(name, part.value, config.name, entry, batches, values))
        elif entry is not None:
            specs.append(_configured_spec(entry, batches))
        else:
            _LOG.info(
                "output '%s' of model '%s' is empty for zeros, and left out; name it in config.pbtxt with its"
                " data_type and dims to serve it", name, config.name,
            )  # fmt: skip
            continue
        paths.append(part.path)
    if not specs:
        raise invalid_argument(
            f"config.pbtxt of model '{config.name}' names no outputs, and the program's result for zeros has none; name"
            " each output with its data_type and dims"
        )
    return _with_results(replace(bound, samples=samples), specs, tuple(paths))


def _with_results(bound: BoundProgram, specs: Sequence[TensorSpec], paths: tuple[Path, ...] | None) -> BoundProgram:
    return replace(
        bound,
        signature=replace(bound.signature, outputs=tuple(specs)),
        outputs={spec.name: index for index, spec in enumerate(specs)},
        paths=paths,
        is_described=False,
    )


def _runs(bound: BoundProgram, trial: Trial) -> tuple[list[tuple[Shapes, Any]], str]:
    """Run the program on zeros of several sizes, if the configuration leaves any open. Return the shapes and results of
    the runs that succeed, and why the first one failed. Raises UnfitPrecision."""
    first = 1 if bound.signature.supports_batching else 0
    is_open = [[size == -1 and index >= first for index, size in enumerate(spec.shape)] for spec in bound.inputs]
    candidates = [bound.samples]
    # Further runs on zeros, where the configuration leaves sizes open: a strided convolution gives one value for many
    # sizes, and a program may have a least or a largest size.
    for least in (2, 32, 64, 256) if any(map(any, is_open)) else ():
        shapes = tuple(
            tuple(max(size, least) if is_own else size for size, is_own in zip(shape, own, strict=True))
            for shape, own in zip(bound.samples, is_open, strict=True)
        )
        # A picture of 512 x 512 has fewer elements.
        if shapes not in candidates and all(math.prod(shape) <= 1 << 20 for shape in shapes):
            candidates.append(shapes)
    runs: list[tuple[Shapes, Any]] = []
    reason = ""
    for shapes in candidates:
        try:
            runs.append((shapes, trial(replace(bound, samples=shapes).zeros(1))))
        except UnfitPrecision:
            raise
        except ServeError as error:
            reason = reason or error.text
    return runs, reason


def _found(
    name: str, value: Any, model: str, entry: OutputConfig | None, batches: bool, values: Sequence[Any]
) -> TensorSpec:
    """Describe an output: `value` is from the first run, `values` are from all. A size varies if two runs differ in it,
    if it is 0 (many detectors find nothing in zeros), or if the configuration says so. Raises
    ServeError (INVALID_ARGUMENT) if the output does not have the batch's rows."""
    is_tensor = isinstance(value, torch.Tensor)
    datatype = datatype_of(value.dtype, f"output '{name}'") if is_tensor else DataType.BYTES
    shape, declared = shape_of(value), () if entry is None else _model_shape(entry, batches)
    if batches and with_dropped_sizes(declared, shape) is not None:
        return TensorSpec(name, datatype, declared)
    if batches and (not shape or shape[0] > 1):
        raise invalid_argument(
            f"output '{name}' of model '{model}' has the shape {list(shape)} for one row, so the model does not batch;"
            " remove max_batch_size, or, if one row lacks only sizes of 1, name the output in"
            " config.pbtxt with its data_type and dims"
        )
    shapes = [other for other in map(shape_of, filter(has_value, values)) if len(other) == len(shape)]
    sizes = [column[0] if len({*column}) == 1 and column[0] else -1 for column in zip(*shapes, strict=True)]
    if batches:
        sizes[0] = -1
    if len(declared) == len(sizes):
        sizes = [-1 if own == -1 else size for own, size in zip(declared, sizes, strict=True)]
    return TensorSpec(name, datatype, tuple(sizes))


def shape_of(output: Any) -> tuple[int, ...]:
    """Return the shape of a tensor or of a list of str."""
    return tuple(output.shape) if isinstance(output, torch.Tensor) else (len(output),)
