"""Validates configurations before a load: Triton's rules in its words (model_config_utils); settings that a backend
does not support, which are refused if responses would change, else named in a warning; and `model_warmup`, whose
samples must be valid requests."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from rocserve.backends.base import BackendSpec
from rocserve.backends.registry import ENSEMBLE_PLATFORM
from rocserve.backends.warmup import WARMUP_FOLDER
from rocserve.config.bounds import check_bounds, check_step_count
from rocserve.config.datatypes import datatype_of_number
from rocserve.config.ensemble_checks import ensemble_faults
from rocserve.config.model_folder import ModelFolder, is_true
from rocserve.config.sequence_validation import sequence_faults, sequence_tensor_names
from rocserve.config.signature_checks import batch_faults
from rocserve.core.errors import ServeError, StatusCode, invalid_argument, unimplemented
from rocserve.core.latencies import DEFAULT_BUCKETS
from rocserve.core.model_config import ModelConfig as PlainConfig
from rocserve.core.printable import names_hint, printable
from rocserve.core.request_prefix import request_prefix
from rocserve.core.requests import InputHead, RequestHead
from rocserve.core.validation import RequestValidator
from rocserve.protocol import model_config_pb2
from rocserve.protocol.model_config_pb2 import (
    ModelConfig,
    ModelDynamicBatching,
    ModelInput,
    ModelInstanceGroup,
    ModelOutput,
    ModelQueuePolicy,
    ModelWarmup,
)


def check_model_config(message: ModelConfig, *, is_completed: bool = False) -> None:
    """Check a normalised configuration without the model; tensors may still be missing. `is_completed`: a size of 0 is
    the model's own. Raises as `check_readable`."""
    check_readable(message)
    check_loadable(message, is_completed=is_completed)


def check_readable(message: ModelConfig) -> None:
    """Check the name, scheduling and metrics, without which a configuration is rejected. Raises ServeError
    (INVALID_ARGUMENT) with the first fault."""
    for fault in _unreadable(message):
        raise invalid_argument(fault)


def check_loadable(message: ModelConfig, *, is_completed: bool = False) -> None:
    """Check tensors and instance groups, as Triton does in a load. Raises as `check_readable`."""
    for fault in _unloadable(message, 0 if is_completed else 1):
        raise invalid_argument(fault)


def _unreadable(message: ModelConfig) -> Iterator[str]:
    if not message.name:
        yield "model configuration must specify 'name'"
    if message.name in (".", "..") or "/" in message.name or not message.name.isprintable():
        yield (
            f"a model cannot have the name '{printable(message.name)}': expected a valid folder name of printable"
            " characters"
        )
    # choose_backend checks that the backend exists.
    is_ensemble = message.platform == ENSEMBLE_PLATFORM
    if is_ensemble and message.backend:
        yield f"Ensemble model '{message.name}' must have platform type '{ENSEMBLE_PLATFORM}' and empty backend type"
    if message.HasField("ensemble_scheduling") and not is_ensemble:
        yield f"ensemble scheduling cannot be set for model '{message.name}' whose platform is not {ENSEMBLE_PLATFORM}"
    if is_ensemble and not message.HasField("ensemble_scheduling"):
        yield f"ensemble scheduling must be set for ensemble {message.name} whose platform is {ENSEMBLE_PLATFORM}"
    if message.max_batch_size < 0:
        yield f"'max_batch_size' must be non-negative value for {message.name}"
    if message.HasField("dynamic_batching"):
        yield from _dynamic_batching_faults(message.dynamic_batching, message)
    if message.HasField("sequence_batching"):
        yield from sequence_faults(message)
    if message.HasField("ensemble_scheduling"):
        check_step_count(message)
        yield from ensemble_faults(message)
    if message.model_transaction_policy.decoupled and message.response_cache.enable:
        yield (
            f"Response Cache does not currently support model {message.name} with 'decoupled' transaction policy."
            " Please disable the response cache."
        )
    for control in message.model_metrics.metric_control:
        if not control.HasField("metric_identifier"):
            yield "metric control must specify 'metric_identifier'"
        if not control.metric_identifier.family:
            yield "metric identifier must specify non-empty 'family'"
        if not control.HasField("histogram_options"):
            yield "metric control must specify 'histogram_options'"
        if not control.histogram_options.buckets:
            yield "histogram options must specify non-empty 'buckets'"
        if any(math.isnan(bucket) for bucket in control.histogram_options.buckets):
            yield "histogram options must specify 'buckets' that are numbers"


def _unloadable(message: ModelConfig, least_size: int) -> Iterator[str]:
    for tensor in message.input:
        yield from _tensor_faults(tensor, "input", message, least_size)
        if tensor.format != ModelInput.FORMAT_NONE and len(tensor.dims) != 3:
            yield f"model input NHWC/NCHW require 3 dims for {message.name}"
    for output in message.output:
        yield from _tensor_faults(output, "output", message, least_size)
    for what, tensors in (("input", message.input), ("output", message.output)):
        for name, count in Counter(tensor.name for tensor in tensors).items():
            if count > 1:
                yield f"model {what} '{name}' is specified {count} times for {message.name}; each name may occur once"
    yield from (f"{fault} for {message.name}" for fault in batch_faults(message))
    check_bounds(message)
    if message.HasField("ensemble_scheduling"):
        return
    if not message.instance_group:
        yield f"must specify one or more 'instance group's for {message.name}"
    for group in message.instance_group:
        who, kind = f"instance group {group.name} of model {message.name}", ModelInstanceGroup.Kind.Name(group.kind)
        if kind in ("KIND_MODEL", "KIND_CPU") and group.gpus:
            yield f"{who} has kind {kind} but specifies one or more GPUs"
        if any(gpu < 0 for gpu in group.gpus):
            yield (
                f"{who} specifies invalid or unsupported gpu id {min(group.gpus)}; expected the numbers of GPUs, from 0"
            )


def _tensor_faults(tensor: ModelInput | ModelOutput, what: str, message: ModelConfig, least_size: int) -> Iterator[str]:
    """Yield the faults. The caller must stop at the first: each check relies on the earlier ones."""
    who = f"model {what} '{tensor.name}'" if tensor.name else f"model {what}"
    for field in ("name", "data_type", "dims"):
        if not getattr(tensor, field):
            yield f"{who} must specify '{field}' for {message.name}"
    form = f"must be integer >= 1, or -1 to indicate a variable-size dimension for {message.name}"
    if any(dim < least_size and dim != -1 for dim in tensor.dims):
        yield f"{who} dimension {form}"
    if tensor.HasField("reshape"):
        shape = tensor.reshape.shape
        if not shape and message.max_batch_size == 0:
            yield (
                f"{who} cannot have empty reshape for non-batching model as scalar tensors are not supported for"
                f" {message.name}"
            )
        if any(dim < 1 and dim != -1 for dim in shape):
            yield f"{who} reshape dimensions {form}"
        trunks, reshaped = _trunk_sizes(tensor.dims), _trunk_sizes(shape)
        if len(trunks) != len(reshaped) and min(len(trunks), len(reshaped)) > 1:
            yield f"{who} has different number of variable-size dimensions for dims and reshape for {message.name}"
        if trunks != reshaped:
            yield f"{who} has different size for dims and reshape for {message.name}"
    if tensor.is_shape_tensor:
        yield f"shape tensors are only supported for TensorRT platform for {message.name}"
    if tensor.is_non_linear_format_io:
        yield f"Non-linear IO format is only supported for the TensorRT platform for {message.name}"


def _trunk_sizes(dims: Sequence[int]) -> list[int]:
    """Return the element counts between variable dimensions: [2, 4, -1, 6] gives [8, 6]."""
    sizes = [1]
    for dim in dims:
        if dim == -1:
            sizes.append(1)
        else:
            sizes[-1] *= dim
    return sizes


def _dynamic_batching_faults(batching: ModelDynamicBatching, message: ModelConfig) -> Iterator[str]:
    name = message.name
    for size in batching.preferred_batch_size:
        if size <= 0:
            yield f"dynamic batching preferred size must be positive for {name}"
        if size > message.max_batch_size:
            yield f"dynamic batching preferred size must be <= max batch size for {name}"
    levels = batching.priority_levels
    if levels:
        if not 1 <= batching.default_priority_level <= levels:
            yield f"default priority level must be in range [1, {levels}] for {name}"
        if not all(1 <= level <= levels for level in batching.priority_queue_policy):
            yield f"priority queue policy must have priority level in range [1, {levels}] for {name}"
    if not batching.preserve_ordering:
        return
    if levels > 1:
        yield f"Only one priority level is allowed when 'preserve_ordering' is true for {name}"
    for policy in (batching.default_queue_policy, *batching.priority_queue_policy.values()):
        if policy.default_timeout_microseconds and policy.timeout_action == ModelQueuePolicy.DELAY:
            yield f"Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for {name}"


def check_supported(message: ModelConfig, backend: BackendSpec | None) -> tuple[str, ...]:
    """Return a warning that names the settings without effect, or nothing. `backend`: None for an ensemble. Raises
    ServeError (UNIMPLEMENTED) if a setting without support would change responses."""
    for setting, advice in _refused(message, backend):
        raise unimplemented(f"model '{message.name}': {setting} is not supported by this version of rocserve; {advice}")
    ignored = tuple(_ignored(message, backend))
    if not ignored:
        return ()
    return (f"model '{message.name}': settings without effect in this version of rocserve: {', '.join(ignored)}",)


def _refused(message: ModelConfig, backend: BackendSpec | None) -> Iterator[tuple[str, str]]:
    """Yield unsupported settings with advice."""
    if backend is None:
        return
    sees_requests = backend.answers_requests
    if message.model_transaction_policy.decoupled and not sees_requests:
        yield (
            "model_transaction_policy.decoupled",
            "only models of the backend 'python' answer with any number of responses",
        )
    if message.model_operations.op_library_filename and not (backend.takes_operators or sees_requests):
        yield (
            "model_operations.op_library_filename",
            "only models of the backend 'onnx' can have custom operators (on ONNX Runtime)",
        )
    if not backend.takes_ragged_batches:
        settings = [setting for setting in ("batch_input", "batch_output") if getattr(message, setting)]
        settings += [f"allow_ragged_batch of input '{one.name}'" for one in message.input if one.allow_ragged_batch]
        advice = (
            "requests of different shapes can share a batch only on the backends 'onnx' (ONNX Runtime) and 'python'"
        )
        yield from ((setting, advice) for setting in settings)


def _ignored(message: ModelConfig, backend: BackendSpec | None) -> Iterator[str]:
    takes_operators = backend is not None and backend.takes_operators
    for field, _ in message.optimization.ListFields():
        # An engine that accepts operators also accepts the optimisation level.
        # Triton always prints both settings of pinned memory; the engines report unsupported accelerators.
        if field.name not in {"input_pinned_memory", "output_pinned_memory", "execution_accelerators"} and not (
            field.name == "graph" and takes_operators
        ):
            yield f"optimization.{field.name}"
    for setting in ("secondary_devices", "profile"):
        if any(getattr(group, setting) for group in message.instance_group):
            yield f"instance_group.{setting}"
    if backend is not None and backend.answers_requests:
        # Such a model sees each request with its own shape.
        yield from (setting for setting in ("batch_input", "batch_output") if getattr(message, setting))
    if message.model_operations.op_library_filename and not takes_operators:
        yield "model_operations.op_library_filename"
    if message.runtime:
        yield "runtime"
    for control in message.model_metrics.metric_control:
        if control.metric_identifier.family not in DEFAULT_BUCKETS:
            yield f"model_metrics of '{control.metric_identifier.family}'"


_REQUEST = request_prefix([""])


def check_warmup(message: ModelConfig, folder: ModelFolder) -> None:
    """Check each sample alone, and that its files exist. Raises ServeError: INVALID_ARGUMENT with the first fault;
    INTERNAL for a missing file."""
    inputs = {tensor.name: tensor for tensor in message.input}
    for sample in message.model_warmup:
        for name, tensor in sample.inputs.items() if sample.batch_size else ():
            for fault in _sample_faults(name, tensor, inputs.get(name), message.name):
                raise _fault(sample.name, fault)
            if tensor.WhichOneof("input_data_type") == "input_data_file":
                what = f"warmup file of input '{name}' of model '{message.name}'"
                file = folder.resolve(tensor.input_data_file, what, WARMUP_FOLDER)
                if not is_true(file.is_file):
                    text = f"failed to open text file for read {file}: No such file or directory"
                    raise _fault(sample.name, text, StatusCode.INTERNAL)


def check_warmup_fits(message: ModelConfig, config: PlainConfig) -> None:
    """Check samples as requests against the completed inputs and batch size. `config`: the message as plain data.
    Raises ServeError (INVALID_ARGUMENT)."""
    given, _ = sequence_tensor_names(message)
    names = {tensor.name for tensor in config.inputs}
    most, validator = max(config.max_batch_size, 1), RequestValidator(config)
    rows = (1,) if config.max_batch_size > 0 else ()
    for sample in config.model_warmup:
        if sample.batch_size > most:
            raise invalid_argument(
                f"failed to run warmup sample '{sample.name}': batch size {sample.batch_size} for '{message.name}', max"
                f" allowed is {most}"
            )
        for name in sample.inputs:
            if name not in names and name not in given:
                raise _fault(
                    sample.name,
                    f"unexpected inference input '{name}' for model '{message.name}'"
                    f"{names_hint('its inputs are', name, names)}",
                )
        # Reversed: the validator checks the last input first, so its error names the sample's first fault.
        inputs = [(name, tensor) for name, tensor in reversed([*sample.inputs.items()]) if name not in given]
        heads = (InputHead(name, tensor.datatype.value, (*rows, *tensor.dims)) for name, tensor in inputs)
        try:
            validator.plan(RequestHead(message.name, "", tuple(heads)), _REQUEST)
        except ServeError as error:
            raise _fault(sample.name, error.text.rstrip()) from None


def _sample_faults(name: str, tensor: ModelWarmup.Input, expected: ModelInput | None, model: str) -> Iterator[str]:
    if tensor.data_type == model_config_pb2.TYPE_INVALID and expected is not None:
        wanted = datatype_of_number(expected.data_type).value
        yield f"{_REQUEST}inference input '{name}' data-type is '<invalid>', but model '{model}' expects '{wanted}'"
    if tensor.data_type == model_config_pb2.TYPE_INVALID:
        yield f"{_REQUEST}inference input '{name}' of model '{model}' has no data-type"
    if any(dim < 0 for dim in tensor.dims):
        yield f"warmup setting expects all variable-size dimensions are specified for input '{name}'"
    if tensor.WhichOneof("input_data_type") is None:
        yield f"{_REQUEST}warmup setting expects input '{name}' to have input_data_type set"


def _fault(sample: str, text: str, code: StatusCode = StatusCode.INVALID_ARGUMENT) -> ServeError:
    return ServeError(code, f"{text} (warm-up sample '{sample}')")
