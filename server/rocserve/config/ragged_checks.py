"""Batches of requests of different shapes in a configuration: allow_ragged_batch, batch_input, batch_output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

from rocserve.config.datatypes import datatype_of_number, format_shape, type_name
from rocserve.core.errors import invalid_argument
from rocserve.core.requests import TensorSpec
from rocserve.protocol import model_config_pb2
from rocserve.protocol.model_config_pb2 import BatchInput, BatchOutput, ModelConfig, ModelInput, ModelOutput

_VARIABLE = -1


def check_batch_tensors(message: ModelConfig) -> None:
    """Batch inputs and outputs: Triton's rules in its words, then what Triton only finds when it runs the first batch.
    Raises: ServeError: INVALID_ARGUMENT with the first fault."""
    if not message.input or not message.output:
        return  # They come from the model; then this is called again.
    # The second kind relies on what the first has found right.
    for fault in chain(_input_faults(message), _output_faults(message)):
        raise invalid_argument(f"{fault} for {message.name}")


def batch_input_targets(message: ModelConfig) -> frozenset[str]:
    """The model's inputs that the server makes."""
    return frozenset(name for entry in message.batch_input for name in entry.target_name)


def has_own_shape(tensor: ModelInput | ModelOutput, message: ModelConfig) -> bool:
    """Whether the model's tensor has another shape than the configuration gives it."""
    if isinstance(tensor, ModelInput):
        return tensor.allow_ragged_batch
    return any(tensor.name in entry.target_name for entry in message.batch_output)


def check_ragged_input(tensor: ModelInput, spec: TensorSpec, message: ModelConfig) -> None:
    """Raises: ServeError: INVALID_ARGUMENT, the model does not take the elements one behind the other."""
    prefix = f"unable to load model '{message.name}', configuration expects model provides input with shape [-1] "
    if tensor.optional:
        raise invalid_argument(f"{prefix}for ragged input '{tensor.name}', which is not supported for optional input")
    if spec.shape != (_VARIABLE,):
        raise invalid_argument(f"{prefix} for ragged input '{tensor.name}', model provides {format_shape(spec.shape)}")


def check_batch_inputs_fit(message: ModelConfig, inputs: Mapping[str, TensorSpec]) -> None:
    """Raises: ServeError: INVALID_ARGUMENT, a batch input is not as the model wants it."""
    for entry in message.batch_input:
        rank = 2 if entry.kind == BatchInput.BATCH_ITEM_SHAPE else 1
        for name in entry.target_name:
            raised = _misfit(name, entry, inputs.get(name), rank)
            if raised is not None:
                raise invalid_argument(f"unable to load model '{message.name}', batch input '{name}' {raised}")


def _misfit(name: str, entry: BatchInput, spec: TensorSpec | None, rank: int) -> str | None:
    if spec is None:
        return "is not an input of the model"
    datatype = datatype_of_number(entry.data_type)
    if spec.datatype is not datatype:
        return f"is {type_name(datatype)} in the configuration, {type_name(spec.datatype)} in the model"
    if len(spec.shape) != rank or spec.shape[0] != _VARIABLE:
        return f"has {rank} dimensions, the first of any size; the model provides {format_shape(spec.shape)}"
    return None


def _input_faults(message: ModelConfig) -> Iterator[str]:
    inputs = {tensor.name: tensor for tensor in message.input}
    for entry in message.batch_input:
        if len(entry.source_input) != 1:
            yield (
                f"batch input kind '{BatchInput.Kind.Name(entry.kind)}' expects 1 source input, got"
                f" {len(entry.source_input)}"
            )
        if entry.data_type not in (model_config_pb2.TYPE_INT32, model_config_pb2.TYPE_FP32):
            yield "batch input data type must be TYPE_INT32 or TYPE_FP32"
        for name in entry.source_input:
            if name not in inputs:
                yield f"unknown source input name '{name}'"
            elif inputs[name].optional:
                yield f"source input '{name}' of a batch input may not be optional: every request has to have it"
        if not entry.target_name:
            yield "batch input must specify 'target_name', the inputs of the model that it becomes"
        for name in entry.target_name:
            if name in inputs:
                yield f"batch input target '{name}' may not be an input of requests too"


def _output_faults(message: ModelConfig) -> Iterator[str]:
    inputs = {tensor.name: tensor for tensor in message.input}
    outputs = {tensor.name: tensor for tensor in message.output}
    for entry in message.batch_output:
        if len(entry.source_input) != 1:
            yield (
                f"batch output kind '{BatchOutput.Kind.Name(entry.kind)}' expects 1 source input, got"
                f" {len(entry.source_input)}"
            )
        for name in entry.source_input:
            if name not in inputs:
                yield f"unknown source input name '{name}'"
        seen: set[str] = set()
        for name in entry.target_name:
            if name not in outputs:
                yield f"unknown target output name '{name}'"
            if name in seen:
                yield f"target output name '{name}' can only be specified once"
            seen.add(name)
        for name in seen:
            yield from _scatter_faults(outputs[name], inputs[entry.source_input[0]])


def _scatter_faults(output: ModelOutput, source: ModelInput) -> Iterator[str]:
    if output.data_type == model_config_pb2.TYPE_STRING:
        yield f"target output '{output.name}' of a batch output is TYPE_STRING, whose elements have no size"
    if source.optional:
        yield f"source input '{source.name}' of a batch output may not be optional: every request has to have it"
    dims = output.reshape.shape if output.HasField("reshape") else output.dims
    rank = len(source.reshape.shape if source.HasField("reshape") else source.dims)
    if any(dim == _VARIABLE for dim in dims[rank:]):
        yield (
            f"target output '{output.name}' has dimensions of any size that its source input '{source.name}' does not"
            " have"
        )
