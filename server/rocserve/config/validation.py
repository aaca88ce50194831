"""What a ModelConfig must fulfil before a model is loaded, in Triton's rules and words (its model_config_utils); and
the parts of it that a backend does not serve: refused where answers would change, else named once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rocserve.backends.base import BackendSpec
from rocserve.backends.registry import ENSEMBLE_PLATFORM
from rocserve.config.bounds import check_bounds, check_step_count
from rocserve.config.ensemble_checks import check_ensemble_scheduling
from rocserve.config.ragged_checks import check_batch_tensors
from rocserve.config.sequence_validation import check_sequence_batching
from rocserve.core.errors import invalid_argument, unimplemented
from rocserve.core.latencies import DEFAULT_BUCKETS
from rocserve.core.printable import printable
from rocserve.protocol import model_config_pb2
from rocserve.protocol.model_config_pb2 import (
    ModelConfig,
    ModelDynamicBatching,
    ModelInput,
    ModelInstanceGroup,
    ModelOutput,
    ModelQueuePolicy,
)

_VARIABLE = -1


def check_model_config(message: ModelConfig) -> None:
    """All that can be checked of a normalised configuration without the model; tensors that are given included. Raises:
    ServeError: INVALID_ARGUMENT with the first fault."""
    check_readable(message)
    check_loadable(message)


def check_readable(message: ModelConfig) -> None:
    """What must be right for the configuration to be taken at all: its scheduling, and that it names what serves it.
    Raises: ServeError: INVALID_ARGUMENT with the first fault."""
    if not message.name:
        raise invalid_argument("model configuration must specify 'name'")
    if message.name in (".", "..") or "/" in message.name or not message.name.isprintable():
        raise invalid_argument(
            f"a model cannot have the name '{printable(message.name)}': it must be one that a folder may have, of"
            " characters that can be printed"
        )
    check_platform(message)
    if message.max_batch_size < 0:
        raise invalid_argument(f"'max_batch_size' must be non-negative value for {message.name}")
    if message.HasField("dynamic_batching"):
        _check_dynamic_batching(message.dynamic_batching, message)
    if message.HasField("sequence_batching"):
        check_sequence_batching(message)
    if message.HasField("ensemble_scheduling"):
        check_step_count(message)
        check_ensemble_scheduling(message)
    if message.model_transaction_policy.decoupled and message.response_cache.enable:
        raise invalid_argument(
            f"Response Cache does not currently support model {message.name} with 'decoupled' transaction policy."
            " Please disable the response cache."
        )
    _check_model_metrics(message)


def check_loadable(message: ModelConfig) -> None:
    """What Triton checks when it loads a version: tensors and instance groups. Raises: ServeError: INVALID_ARGUMENT
    with the first fault."""
    check_tensors(message)
    check_batch_tensors(message)
    check_bounds(message)
    _check_instance_groups(message)


def check_platform(message: ModelConfig) -> None:
    """`platform` and `backend` fit each other and the scheduling; that a backend exists is checked elsewhere."""
    is_ensemble = message.platform == ENSEMBLE_PLATFORM
    if is_ensemble and message.backend:
        raise invalid_argument(
            f"Ensemble model '{message.name}' must have platform type '{ENSEMBLE_PLATFORM}' and empty backend type"
        )
    if message.HasField("ensemble_scheduling") and not is_ensemble:
        raise invalid_argument(
            f"ensemble scheduling cannot be set for model '{message.name}' whose platform is not {ENSEMBLE_PLATFORM}"
        )
    if is_ensemble and not message.HasField("ensemble_scheduling"):
        raise invalid_argument(
            f"ensemble scheduling must be set for ensemble {message.name} whose platform is {ENSEMBLE_PLATFORM}"
        )
    if not message.platform and not message.backend:
        raise invalid_argument(f"must specify 'platform' or 'backend' for '{message.name}'")


def check_tensors(message: ModelConfig) -> None:
    """Inputs and outputs: names, datatypes, dims, reshapes and formats."""
    for tensor in message.input:
        _check_tensor(tensor, "model input ", message)
        if tensor.format != ModelInput.FORMAT_NONE and len(tensor.dims) != 3:
            raise invalid_argument(f"model input NHWC/NCHW require 3 dims for {message.name}")
    for output in message.output:
        _check_tensor(output, "model output ", message)
    _check_unique("model input", [tensor.name for tensor in message.input], message.name)
    _check_unique("model output", [tensor.name for tensor in message.output], message.name)


def _check_unique(what: str, names: Iterable[str], model: str) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise invalid_argument(f"{what} '{name}' is specified {count} times for {model}; each name may stand once")


def _check_tensor(tensor: ModelInput | ModelOutput, prefix: str, message: ModelConfig) -> None:
    fault = _tensor_fault(tensor, message.max_batch_size)
    if fault:
        named = f"{prefix}'{tensor.name}' " if tensor.name else prefix
        raise invalid_argument(f"{named}{fault} for {message.name}")
    if tensor.is_shape_tensor:
        raise invalid_argument(f"shape tensors are only supported for TensorRT platform for {message.name}")
    if tensor.is_non_linear_format_io:
        raise invalid_argument(f"Non-linear IO format is only supported for the TensorRT platform for {message.name}")


def _tensor_fault(tensor: ModelInput | ModelOutput, max_batch_size: int) -> str:
    if not tensor.name:
        return "must specify 'name'"
    if tensor.data_type == model_config_pb2.TYPE_INVALID:
        return "must specify 'data_type'"
    if not tensor.dims:
        return "must specify 'dims'"
    if not all(_is_dimension(dim) for dim in tensor.dims):
        return f"dimension must be integer >= 1, or {_VARIABLE} to indicate a variable-size dimension"
    if not tensor.HasField("reshape"):
        return ""
    return _reshape_fault(list(tensor.dims), list(tensor.reshape.shape), max_batch_size)


def _reshape_fault(dims: list[int], shape: list[int], max_batch_size: int) -> str:
    if not shape and max_batch_size == 0:
        return "cannot have empty reshape for non-batching model as scalar tensors are not supported"
    if not all(_is_dimension(dim) for dim in shape):
        return f"reshape dimensions must be integer >= 1, or {_VARIABLE} to indicate a variable-size dimension"
    trunks, reshaped = _trunk_sizes(dims), _trunk_sizes(shape)
    if (len(trunks) == 1) != (len(reshaped) == 1):
        return "has different size for dims and reshape"
    if len(trunks) != len(reshaped):
        return "has different number of variable-size dimensions for dims and reshape"
    return "has different size for dims and reshape" if trunks != reshaped else ""


def _trunk_sizes(dims: Sequence[int]) -> list[int]:
    """Element counts of the stretches between dimensions of any size: [2, 4, -1, 6] gives [8, 6]."""
    sizes = [1]
    for dim in dims:
        if dim == _VARIABLE:
            sizes.append(1)
        else:
            sizes[-1] *= dim
    return sizes


def _is_dimension(dim: int) -> bool:
    return dim >= 1 or dim == _VARIABLE


def _check_dynamic_batching(batching: ModelDynamicBatching, message: ModelConfig) -> None:
    name = message.name
    for size in batching.preferred_batch_size:
        if size <= 0:
            raise invalid_argument(f"dynamic batching preferred size must be positive for {name}")
        if size > message.max_batch_size:
            raise invalid_argument(f"dynamic batching preferred size must be <= max batch size for {name}")
    levels = batching.priority_levels
    if levels:
        if not 1 <= batching.default_priority_level <= levels:
            raise invalid_argument(f"default priority level must be in range [1, {levels}] for {name}")
        if not all(1 <= level <= levels for level in batching.priority_queue_policy):
            raise invalid_argument(f"priority queue policy must have priority level in range [1, {levels}] for {name}")
    if batching.preserve_ordering:
        _check_order_can_be_kept(batching, name)


def _check_order_can_be_kept(batching: ModelDynamicBatching, name: str) -> None:
    if batching.priority_levels > 1:
        raise invalid_argument(f"Only one priority level is allowed when 'preserve_ordering' is true for {name}")
    for policy in (batching.default_queue_policy, *batching.priority_queue_policy.values()):
        if policy.default_timeout_microseconds and policy.timeout_action == ModelQueuePolicy.DELAY:
            raise invalid_argument(
                f"Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for {name}"
            )


def _check_instance_groups(message: ModelConfig) -> None:
    if message.HasField("ensemble_scheduling"):
        return
    if not message.instance_group:
        raise invalid_argument(f"must specify one or more 'instance group's for {message.name}")
    for group in message.instance_group:
        fault = _instance_group_fault(group)
        if fault:
            raise invalid_argument(f"instance group {group.name} of model {message.name} {fault}")


def _instance_group_fault(group: ModelInstanceGroup) -> str:
    kind = ModelInstanceGroup.Kind.Name(group.kind)
    if kind in ("KIND_MODEL", "KIND_CPU") and group.gpus:
        return f"has kind {kind} but specifies one or more GPUs"
    if any(gpu < 0 for gpu in group.gpus):
        return f"specifies invalid or unsupported gpu id {min(group.gpus)}; expected the numbers of GPUs, from 0"
    return ""


def _check_model_metrics(message: ModelConfig) -> None:
    for control in message.model_metrics.metric_control:
        if not control.HasField("metric_identifier"):
            raise invalid_argument("metric control must specify 'metric_identifier'")
        if not control.metric_identifier.family:
            raise invalid_argument("metric identifier must specify non-empty 'family'")
        if not control.HasField("histogram_options"):
            raise invalid_argument("metric control must specify 'histogram_options'")
        if not control.histogram_options.buckets:
            raise invalid_argument("histogram options must specify non-empty 'buckets'")
        if any(math.isnan(bucket) for bucket in control.histogram_options.buckets):
            raise invalid_argument("histogram options must specify 'buckets' that are numbers")


_SILENT = {"input_pinned_memory", "output_pinned_memory", "execution_accelerators"}
"""The first two are written into every configuration that Triton prints; they need no warning. Of the
last the engines say themselves what they cannot have."""


def check_supported(message: ModelConfig, backend: BackendSpec | None) -> tuple[str, ...]:
    """One warning that names the settings without effect, or none. `backend`: None of an ensemble. Raises: ServeError:
    UNIMPLEMENTED for a setting without which the model would answer differently."""
    for setting, advice in _refused(message, backend):
        raise unimplemented(f"model '{message.name}': {setting} is not supported by this version of rocserve; {advice}")
    ignored = tuple(_ignored(message, backend))
    if not ignored:
        return ()
    return (f"model '{message.name}': settings without effect in this version of rocserve: {', '.join(ignored)}",)


def _refused(message: ModelConfig, backend: BackendSpec | None) -> Iterator[tuple[str, str]]:
    """The settings that cannot be honoured, each with what to do."""
    if backend is not None:
        if message.model_transaction_policy.decoupled and not backend.answers_requests:
            yield (
                "model_transaction_policy.decoupled",
                "only models of the backend 'python' answer with any number of responses",
            )
        if message.model_operations.op_library_filename and not (backend.takes_operators or backend.answers_requests):
            yield (
                "model_operations.op_library_filename",
                "only models of the backend 'onnx' can have custom operators (on ONNX Runtime)",
            )
        if not backend.takes_ragged_batches:
            for setting in _ragged(message):
                yield (
                    setting,
                    "requests of different shapes can share a batch only on the backends 'onnx' (ONNX Runtime) and"
                    " 'python'",
                )


def _ragged(message: ModelConfig) -> Iterator[str]:
    for setting in ("batch_input", "batch_output"):
        if getattr(message, setting):
            yield setting
    for tensor in message.input:
        if tensor.allow_ragged_batch:
            yield f"allow_ragged_batch of input '{tensor.name}'"


def _ignored(message: ModelConfig, backend: BackendSpec | None) -> Iterator[str]:
    takes_operators = backend is not None and backend.takes_operators
    for field, _ in message.optimization.ListFields():
        # Where a graph can be given operators, it can be optimised too.
        if field.name not in _SILENT and not (field.name == "graph" and takes_operators):
            yield f"optimization.{field.name}"
    for setting in ("secondary_devices", "profile"):
        if any(getattr(group, setting) for group in message.instance_group):
            yield f"instance_group.{setting}"
    if backend is not None and backend.answers_requests:
        # Its models see each request with its own shape.
        yield from (setting for setting in ("batch_input", "batch_output") if getattr(message, setting))
    if message.model_operations.op_library_filename and not takes_operators:
        yield "model_operations.op_library_filename"
    if message.runtime:
        yield "runtime"
    for control in message.model_metrics.metric_control:
        if control.metric_identifier.family not in DEFAULT_BUCKETS:
            yield f"model_metrics of '{control.metric_identifier.family}'"
