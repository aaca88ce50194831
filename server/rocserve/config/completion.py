"""Completes a configuration: writes defaults, and takes tensors and batching from the loaded model. The rules are
Triton's: its normalisation of configurations and the auto-complete of its ONNX Runtime backend."""

from __future__ import annotations

from collections.abc import Sequence

from rocserve.backends.base import BackendSpec
from rocserve.backends.registry import ENSEMBLE_PLATFORM
from rocserve.config.datatypes import type_number
from rocserve.config.sequence_validation import sequence_tensor_names
from rocserve.config.signature_checks import batch_input_targets, tensor_fits
from rocserve.core.errors import invalid_argument
from rocserve.core.requests import Signature, TensorSpec
from rocserve.core.validation import format_shape
from rocserve.protocol.model_config_pb2 import ModelConfig, ModelInput, ModelInstanceGroup, ModelOutput


def normalise(message: ModelConfig, backend: BackendSpec | None) -> None:
    """Write the defaults that need no model into the message. Idempotent."""
    if not message.HasField("version_policy"):
        message.version_policy.latest.num_versions = 1
    if message.HasField("ensemble_scheduling"):
        if not message.backend:
            message.platform = message.platform or ENSEMBLE_PLATFORM
        message.model_transaction_policy.SetInParent()
        return
    for field in ("input_pinned_memory", "output_pinned_memory"):
        # These have no effect here, but clients expect them, as in Triton's responses.
        if not message.optimization.HasField(field):
            getattr(message.optimization, field).enable = True
    batching = message.sequence_batching
    if message.HasField("sequence_batching"):
        batching.max_sequence_idle_microseconds = batching.max_sequence_idle_microseconds or 1_000_000
    for owner, batcher in ((message, "dynamic_batching"), (batching, "oldest")):
        if owner.HasField(batcher) and message.max_batch_size > 0:
            sizes = getattr(owner, batcher).preferred_batch_size
            sizes.extend([] if sizes else [message.max_batch_size])
    if not message.instance_group:
        message.instance_group.add(name=message.name, kind=ModelInstanceGroup.KIND_AUTO)
    for index, group in enumerate(message.instance_group):
        group.name = group.name or f"{message.name}_{index}"
        if group.count < 1:
            group.count = 1
            if backend is not None and group.kind == ModelInstanceGroup.KIND_CPU:
                # The backend's first engine runs the model, unless the parameter names another.
                wanted = message.parameters["engine"].string_value if "engine" in message.parameters else ""
                engine = next((engine for engine in backend.engines if engine.name == wanted), backend.engines[0])
                # Triton's default for a KIND_CPU group; only engines that are safe on several threads keep it.
                group.count = 2 if engine.thread_safe else 1


def autofill(message: ModelConfig, signature: Signature, default_max_batch_size: int) -> tuple[str, ...]:
    """Complete missing inputs or outputs from the model, and then also max_batch_size and dynamic batching. Returns
    notes. Raises ServeError (INVALID_ARGUMENT) if the model cannot batch or leaves a batch output open."""
    if message.input and message.output:
        return ()
    notes: tuple[str, ...] = ()
    if not signature.supports_batching:
        if message.max_batch_size != 0:
            raise invalid_argument(
                f"autofill failed for model '{message.name}': model does not support batching while non-zero"
                f" max_batch_size is specified; its inputs are {_shapes(signature)}: write max_batch_size: 0, or"
                " export it with an open first dimension"
            )
    else:
        is_open = message.max_batch_size == 0 and not message.HasField("max_batch_size")
        if is_open and signature.dependent_rows:
            notes = (
                f"max_batch_size stays 0 for model '{message.name}', so requests run one by one:"
                f" {signature.dependent_rows}",
            )
        elif is_open:
            most = default_max_batch_size if signature.max_batch_size is None else signature.max_batch_size
            message.max_batch_size = max(min(default_max_batch_size, most), 0)
            notes = (
                f"autofilled max_batch_size to {message.max_batch_size} for model '{message.name}' since batching is"
                " supported but no max_batch_size is specified in model configuration; specify max_batch_size for"
                " larger batches",
            )
        if message.max_batch_size > 1 and message.WhichOneof("scheduling_choice") is None:
            message.dynamic_batching.SetInParent()
    _fill_tensors(message, signature)
    return notes


def _shapes(signature: Signature) -> str:
    return ", ".join(f"{spec.name} {format_shape(spec.shape)}" for spec in signature.inputs)


def fill_from_model(message: ModelConfig, signature: Signature) -> None:
    """Complete from a model that answers requests. Triton's Python models do so in `auto_complete_config`: they see the
    configuration, then add tensors, set max_batch_size, and ask for a dynamic batcher or the decoupled policy. Only
    max_batch_size and the decoupled policy override the configuration's values."""
    if signature.max_batch_size is not None:
        message.max_batch_size = signature.max_batch_size
    if signature.dynamic_batching and message.WhichOneof("scheduling_choice") is None:
        message.dynamic_batching.SetInParent()
    if signature.decoupled:
        message.model_transaction_policy.decoupled = True
    # Tensors missing from the configuration are added, partly configured ones completed.
    batches = message.max_batch_size > 0
    given, _ = sequence_tensor_names(message)
    inputs = {tensor.name: tensor for tensor in message.input}
    for spec in signature.inputs:
        if spec.name not in given:
            entry = inputs.get(spec.name) or message.input.add(optional=spec.name in signature.optional_inputs)
            _complete_tensor(entry, spec, batches)
            entry.allow_ragged_batch |= spec.name in signature.ragged_inputs
    outputs = {tensor.name: tensor for tensor in message.output}
    for spec in signature.outputs:
        _complete_tensor(outputs.get(spec.name) or message.output.add(), spec, batches)


def replace_declared_tensors(message: ModelConfig, signature: Signature) -> tuple[str, ...]:
    """Replace declared tensors that contradict the model, for dialects whose tensors are only descriptions: AMD
    Inference Server compares neither names nor the order of dimensions. Returns warnings."""
    warnings: list[str] = []
    # In this dialect only the parameter `batch` asks for batches.
    couples = "" if "batch" in message.parameters else signature.dependent_rows
    if message.max_batch_size > 0 and (couples or not signature.supports_batching):
        reason = f" ({couples})" if couples else ""
        warnings.append(f"model '{message.name}' cannot batch: requests run one by one{reason}")
        message.max_batch_size = 0
        message.ClearField("dynamic_batching")
    required = {spec.name for spec in signature.inputs} - signature.optional_inputs
    inputs: tuple[str, Sequence[ModelInput | ModelOutput], Sequence[TensorSpec]]
    inputs, outputs = ("input", message.input, signature.inputs), ("output", message.output, signature.outputs)
    for what, tensors, specs in (inputs, outputs):
        own = {spec.name: spec for spec in specs}
        fits = all(tensor.name in own and tensor_fits(tensor, own[tensor.name], message) for tensor in tensors)
        lacks = tensors and what == "input" and not required <= {tensor.name for tensor in tensors}
        if lacks or not fits:
            warnings.append(
                f"model '{message.name}': the {what}s of the configuration differ from the model's, which are used:"
                f" {', '.join(own)}"
            )
            message.ClearField(what)
    _fill_tensors(message, signature)
    return tuple(warnings)


def _fill_tensors(message: ModelConfig, signature: Signature) -> None:
    batches = message.max_batch_size > 0
    given, kept = sequence_tensor_names(message)
    given |= batch_input_targets(message)
    if not message.input:
        for spec in signature.inputs:
            if spec.name not in given:
                _fill_tensor(message.input.add(optional=spec.name in signature.optional_inputs), spec, batches)
    if not message.output:
        scattered = {name for entry in message.batch_output for name in entry.target_name}
        for spec in signature.outputs:
            if spec.name in scattered:
                raise invalid_argument(
                    f"autofill failed for model '{message.name}': the model does not say the shape that each request"
                    f" gets of batch output '{spec.name}'; write its outputs into the configuration"
                )
            if spec.name not in kept:
                _fill_tensor(message.output.add(), spec, batches)


def _complete_tensor(tensor: ModelInput | ModelOutput, spec: TensorSpec, batches: bool) -> None:
    tensor.name = spec.name
    tensor.data_type = tensor.data_type or type_number(spec.datatype)
    if not tensor.dims:
        tensor.dims.extend(spec.shape[1:] if batches else spec.shape)


def _fill_tensor(tensor: ModelInput | ModelOutput, spec: TensorSpec, batches: bool) -> None:
    _complete_tensor(tensor, spec, batches)
    if not tensor.dims:
        # The tensor, or each row of its batch, is a scalar. config.pbtxt cannot express "no dims", so dims is [1],
        # which `reshape` removes for the model.
        tensor.dims.append(1)
        if batches:
            tensor.reshape.SetInParent()
