"""Checks of a configuration against the loaded model's signature, in the words of Triton's ONNX Runtime backend; and of
ragged batches: allow_ragged_batch, batch_input, batch_output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rocserve.config.datatypes import datatype_of_number, type_name
from rocserve.config.plain import sequence_batching
from rocserve.config.sequence_validation import sequence_tensor_names
from rocserve.core.errors import internal, invalid_argument
from rocserve.core.model_config import control_inputs
from rocserve.core.requests import Signature, TensorSpec
from rocserve.core.validation import admits, format_shape
from rocserve.protocol import model_config_pb2
from rocserve.protocol.model_config_pb2 import BatchInput, BatchOutput, ModelConfig, ModelInput, ModelOutput


def check_signature(message: ModelConfig, signature: Signature) -> tuple[str, ...]:
    """Compare configuration and model, and return warnings. Raises ServeError: INVALID_ARGUMENT if a tensor is unknown
    to the model, missing, or of another datatype or shape; INTERNAL if a sequence control is unknown to the model."""
    _check_inputs_complete(message, signature)
    inputs = {spec.name: spec for spec in signature.inputs}
    outputs = {spec.name: spec for spec in signature.outputs}
    for tensor in message.input:
        _check_tensor(tensor, "input", inputs, message)
    for output in message.output:
        _check_tensor(output, "output", outputs, message)
    check_batch_inputs_fit(message, inputs)
    if message.HasField("sequence_batching"):
        _check_sequence_tensors(message, inputs, outputs)
    if not message.output:
        raise invalid_argument(
            f"unable to load model '{message.name}', configuration must specify at least one 'output'; the model"
            f" provides: {', '.join(sorted(outputs))}"
        )
    return tuple(
        f"model '{message.name}': input '{tensor.name}' is optional in the configuration, but the model needs it;"
        " requests without it will fail"
        for tensor in message.input
        if tensor.optional and tensor.name not in signature.optional_inputs
    )


def tensor_fits(tensor: ModelInput | ModelOutput, spec: TensorSpec, message: ModelConfig) -> bool:
    """Whether a configured tensor has the model's datatype and an admissible shape."""
    return datatype_of_number(tensor.data_type) is spec.datatype and not _shape_fault(tensor, spec, message)


def _check_inputs_complete(message: ModelConfig, signature: Signature) -> None:
    given = {tensor.name for tensor in message.input} | sequence_tensor_names(message)[0] | batch_input_targets(message)
    required = {spec.name for spec in signature.inputs} - signature.optional_inputs
    # If only a name is wrong, _check_tensor has the clearer error.
    if len(given) < len(required) or len(given) > len(signature.inputs):
        missing = sorted(required - given)
        detail = f"; missing: {', '.join(missing)}" if missing else ""
        raise invalid_argument(
            f"unable to load model '{message.name}', configuration expects {len(given)} inputs, model provides"
            f" {len(signature.inputs)}{detail}"
        )


def _check_sequence_tensors(
    message: ModelConfig, inputs: dict[str, TensorSpec], outputs: dict[str, TensorSpec]
) -> None:
    """Check controls and states, which are tensors of the model too."""
    batching = sequence_batching(message.sequence_batching)
    for control in control_inputs(batching):
        spec = inputs.get(control.name)
        if spec is None:
            raise internal(
                f"configuration specified sequence control '{control.name}', but model does not provide that input"
            )
        dims = spec.shape[1:] if message.max_batch_size > 0 else spec.shape
        prefix = f"unable to load model '{message.name}', sequence control '{control.name}'"
        if dims not in ((1,), (-1,)):
            raise invalid_argument(f"{prefix} in model has dims {format_shape(dims)} but dims [1] is expected")
        if spec.datatype is not control.datatype:
            raise invalid_argument(
                f"{prefix}, the model expects data-type {spec.datatype.value} but the model configuration specifies"
                f" data-type {type_name(control.datatype)}"
            )
    for state in message.sequence_batching.state:
        given = ModelInput(name=state.input_name, data_type=state.data_type, dims=state.dims)
        kept = ModelOutput(name=state.output_name, data_type=state.data_type, dims=state.dims)
        _check_tensor(given, "input", inputs, message)
        _check_tensor(kept, "output", outputs, message)


def _check_tensor(
    tensor: ModelInput | ModelOutput, what: str, specs: dict[str, TensorSpec], message: ModelConfig
) -> None:
    spec = specs.get(tensor.name)
    if spec is None:
        raise invalid_argument(
            f"unexpected inference {what} '{tensor.name}', allowed {what}s are: {', '.join(sorted(specs))} (unable to"
            f" load model '{message.name}')"
        )
    datatype = datatype_of_number(tensor.data_type)
    if datatype is not spec.datatype:
        raise invalid_argument(
            f"unable to load model '{message.name}', configuration expects datatype {type_name(datatype)} for {what}"
            f" '{tensor.name}', model provides {type_name(spec.datatype)}"
        )
    if isinstance(tensor, ModelInput) and tensor.allow_ragged_batch:
        # The model gets the requests' elements concatenated.
        prefix = f"unable to load model '{message.name}', configuration expects model provides input with shape [-1] "
        ragged = f"for ragged input '{tensor.name}'"
        if tensor.optional:
            raise invalid_argument(f"{prefix}{ragged}, which is not supported for optional input")
        if spec.shape != (-1,):
            raise invalid_argument(f"{prefix} {ragged}, model provides {format_shape(spec.shape)}")
        return
    if isinstance(tensor, ModelOutput) and any(tensor.name in entry.target_name for entry in message.batch_output):
        return
    fault = _shape_fault(tensor, spec, message)
    if fault:
        raise invalid_argument(fault)


def _shape_fault(tensor: ModelInput | ModelOutput, spec: TensorSpec, message: ModelConfig) -> str:
    dims = list(tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims)
    shape, batches = spec.shape, message.max_batch_size > 0
    prefix = f"model '{message.name}', tensor '{tensor.name}': "
    if spec.any_rank:
        return ""
    if batches and shape[:1] != (-1,):
        return (
            f"{prefix}for the model to support batching the shape should have at least 1 dimension and the first"
            f" dimension must be -1; but shape expected by the model is {format_shape(shape)}"
        )
    full = [-1, *dims] if batches else dims
    # config.pbtxt cannot express a size of 0, so an open dimension represents it.
    sized = [0 if own == 0 and dim == -1 else dim for own, dim in zip(shape, full, strict=False)]
    sized += full[len(sized) :]
    if admits(shape, sized) or (not shape and all(dim == 1 for dim in dims)):
        return ""
    if not shape:
        return (
            f"unable to load model '{message.name}', scalar tensor '{tensor.name}', should only provide 1 in the model"
            " configuration when the model doesn't support batching. Model configuration provided:"
            f" {format_shape(dims)}."
        )
    given = f"(shape {format_shape(dims)})"
    if batches:
        given = (
            "(an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape, making"
            f" complete shape {format_shape(full)})"
        )
    elif shape[0] == -1 and admits(shape[1:], dims):
        given += "; set max_batch_size above 0 to batch, or write the whole shape into dims"
    differing = next((index for index, (own, dim) in enumerate(zip(shape, full, strict=False)) if own != dim), 0)
    which = (
        ""
        if len(shape) != len(full)
        else (f"; dimension {differing} is {shape[differing]} in the model, {full[differing]} in the configuration")
    )
    # A server shows such a tensor as [-1,1].
    is_column = batches and shape == (-1,) and len(dims) == 1
    single = "; the model has one value for each row: write dims: [ 1 ] and reshape { shape: [ ] }" if is_column else ""
    return (
        f"{prefix}the model expects {len(shape)} dimensions (shape {format_shape(shape)}) but the model configuration"
        f" specifies {len(full)} dimensions {given}{which}{single}"
    )


def batch_input_targets(message: ModelConfig) -> frozenset[str]:
    """Return the model's inputs that the server generates."""
    return frozenset(name for entry in message.batch_input for name in entry.target_name)


def check_batch_inputs_fit(message: ModelConfig, inputs: Mapping[str, TensorSpec]) -> None:
    """Compare batch inputs with the model's inputs. Raises ServeError (INVALID_ARGUMENT)."""
    for entry in message.batch_input:
        rank = 2 if entry.kind == BatchInput.BATCH_ITEM_SHAPE else 1
        for name in entry.target_name:
            prefix = f"unable to load model '{message.name}', batch input '{name}'"
            spec, datatype = inputs.get(name), datatype_of_number(entry.data_type)
            if spec is None:
                raise invalid_argument(f"{prefix} is not an input of the model")
            if spec.datatype is not datatype:
                raise invalid_argument(
                    f"{prefix} is {type_name(datatype)} in the configuration, {type_name(spec.datatype)} in the model"
                )
            if len(spec.shape) != rank or spec.shape[0] != -1:
                raise invalid_argument(
                    f"{prefix} has {rank} dimensions, the first of any size; the model provides"
                    f" {format_shape(spec.shape)}"
                )


def batch_faults(message: ModelConfig) -> Iterator[str]:
    """Yield the faults of batch inputs and outputs: Triton's rules in its words, and faults that Triton finds only in
    the first batch. The caller must stop at the first. Tensors that the model must supply are skipped."""
    inputs = {tensor.name: tensor for tensor in message.input}
    outputs = {tensor.name: tensor for tensor in message.output}
    entries: tuple[BatchInput | BatchOutput, ...] = (*message.batch_input, *message.batch_output)
    for entry in entries:
        what, count = ("input" if isinstance(entry, BatchInput) else "output"), len(entry.source_input)
        if count != 1:
            yield f"batch {what} kind '{type(entry).Kind.Name(entry.kind)}' expects 1 source input, got {count}"
        if isinstance(entry, BatchInput) and entry.data_type not in (
            model_config_pb2.TYPE_INT32,
            model_config_pb2.TYPE_FP32,
        ):
            yield "batch input data type must be TYPE_INT32 or TYPE_FP32"
        name = entry.source_input[0]
        if not inputs:
            continue
        if name not in inputs:
            yield f"unknown source input name '{name}'"
        source = inputs[name]
        if isinstance(entry, BatchOutput):
            yield from _scatter_faults(entry, source, outputs) if outputs else ()
        else:
            if not entry.target_name:
                yield "batch input must specify 'target_name', the inputs of the model that it becomes"
            for target in entry.target_name:
                if target in inputs:
                    yield f"batch input target '{target}' may not be an input of requests too"
        if source.optional:
            yield f"source input '{name}' of a batch {what} may not be optional: every request has to have it"


def _scatter_faults(entry: BatchOutput, source: ModelInput, outputs: Mapping[str, ModelOutput]) -> Iterator[str]:
    rank = len(source.reshape.shape if source.HasField("reshape") else source.dims)
    seen: set[str] = set()
    for name in entry.target_name:
        if name not in outputs:
            yield f"unknown target output name '{name}'"
        if name in seen:
            yield f"target output name '{name}' can only be specified once"
        seen.add(name)
        output = outputs[name]
        if output.data_type == model_config_pb2.TYPE_STRING:
            yield f"target output '{name}' of a batch output is TYPE_STRING, whose elements have no size"
        dims = output.reshape.shape if output.HasField("reshape") else output.dims
        if any(dim == -1 for dim in dims[rank:]):
            yield (
                f"target output '{name}' has dimensions of any size that its source input '{source.name}' does not have"
            )
