"""Plain configurations: converts a validated ModelConfig message to the dataclasses that the rest of the server uses.
Fields are read by name and converted by the types in core.model_config, except fields with another name in the message
(`_NAMES`), and fields (`_FIELDS`) and types (`_KINDS`) with another form."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any, TypeVar

from rocserve.config.datatypes import datatype_of_number
from rocserve.core import model_config as plain
from rocserve.core.datatypes import DataType
from rocserve.core.model_config import ControlKind, ModelConfig, SequenceControl, VersionPolicy
from rocserve.core.requests import Signature, TensorSpec
from rocserve.protocol import model_config_pb2 as messages
from rocserve.protocol.model_config_pb2 import ModelSequenceBatching

Labels = Mapping[str, tuple[str, ...]]
"""Output's name -> its labels."""

_Convert = Callable[[Any], Any]
_Tensor = TypeVar("_Tensor", plain.InputConfig, plain.OutputConfig)


def to_plain(message: messages.ModelConfig, backend: str, labels: Labels) -> ModelConfig:
    """Convert a normalised and validated message. `backend`: the backend's canonical name, or "ensemble". `labels`: the
    lines of each output's label file."""
    config: ModelConfig = _converter(ModelConfig)(message)
    outputs = tuple(replace(one, labels=labels[one.name]) if one.name in labels else one for one in config.outputs)
    return replace(config, backend=backend, outputs=outputs)


def sequence_batching(message: ModelSequenceBatching) -> plain.SequenceBatching:
    found: plain.SequenceBatching = _converter(plain.SequenceBatching)(message)
    return found


def correct_by_signature(config: ModelConfig, signature: Signature) -> ModelConfig:
    """Correct by the loaded model what config.pbtxt cannot express. Inputs that only the configuration declares
    optional become required. Scalars get an empty reshape, as their dims are ones without batching.
    The model's classes become the labels of outputs without a label file."""
    needed = {spec.name for spec in signature.inputs} - signature.optional_inputs
    inputs = {spec.name: spec for spec in signature.inputs}
    outputs = {spec.name: spec for spec in signature.outputs}

    def corrected(tensor: _Tensor, spec: TensorSpec | None) -> _Tensor:
        if spec is None or config.max_batch_size > 0:
            return tensor
        return replace(tensor, any_rank=spec.any_rank, reshape=tensor.reshape if spec.shape else ())

    return replace(
        config,
        purpose=signature.purpose,
        inputs=tuple(
            replace(corrected(tensor, inputs.get(tensor.name)), optional=tensor.optional and tensor.name not in needed)
            for tensor in config.inputs
        ),
        outputs=tuple(
            replace(
                corrected(tensor, outputs.get(tensor.name)),
                labels=tensor.labels or (outputs[tensor.name].labels if tensor.name in outputs else ()),
            )
            for tensor in config.outputs
        ),
    )


@functools.cache
def _converter(kind: type) -> _Convert:
    """Return the converter from a message to a dataclass."""
    hints = typing.get_type_hints(kind)
    fields = {
        one.name: _FIELDS.get((kind, one.name)) or _field(one.name, hints[one.name]) for one in dataclasses.fields(kind)
    }
    return lambda message: kind(**{name: read(message) for name, read in fields.items()})


def _field(name: str, hint: Any) -> _Convert:
    """Return the converter of a field, from the message that has it."""
    path = _NAMES.get(name, name)
    get = attrgetter(path)
    if isinstance(hint, types.UnionType):
        convert = _value(next(one for one in typing.get_args(hint) if one is not types.NoneType))
        return lambda message: convert(get(message)) if message.HasField(path) else None
    if isinstance(hint, type) and issubclass(hint, enum.Enum) and hint is not DataType:
        return lambda message: hint(
            message.DESCRIPTOR.fields_by_name[path].enum_type.values_by_number[get(message)].name
        )
    convert = _value(hint)
    return get if convert is _same else lambda message: convert(get(message))


def _value(hint: Any) -> _Convert:
    if hint in _KINDS:
        return _KINDS[hint]
    if dataclasses.is_dataclass(hint):
        return _converter(typing.cast("type", hint))
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        convert = _value(parts[0])
        return tuple if convert is _same else lambda values: tuple(map(convert, values))
    if origin is Mapping:
        convert = _value(parts[1])
        return lambda entries: {key: convert(value) for key, value in sorted(entries.items())}
    return _same


def _same(value: Any) -> Any:
    return value


def version_policy(message: messages.ModelVersionPolicy) -> VersionPolicy:
    """An empty policy means all versions, as in Triton."""
    return VersionPolicy(
        message.latest.num_versions if message.HasField("latest") else None,
        tuple(message.specific.versions) if message.HasField("specific") else None,
    )


def _control(name: str, message: ModelSequenceBatching.Control) -> SequenceControl:
    kind = ControlKind(ModelSequenceBatching.Control.Kind.Name(message.kind))
    if kind is ControlKind.CORRELATION_ID:
        return SequenceControl(name, kind, datatype_of_number(message.data_type))
    yes_and_no = {
        "fp32_false_true": DataType.FP32,
        "bool_false_true": DataType.BOOL,
        "int32_false_true": DataType.INT32,
    }
    given = next(field for field in yes_and_no if getattr(message, field))
    no, yes = getattr(message, given)
    return SequenceControl(name, kind, yes_and_no[given], float(no), float(yes))


_NAMES = {
    "batch_inputs": "batch_input",
    "cpu_accelerators": "optimization.execution_accelerators.cpu_execution_accelerator",
    "datatype": "data_type",
    "decoupled": "model_transaction_policy.decoupled",
    "ensemble_max_inflight_requests": "ensemble_scheduling.max_inflight_requests",
    "ensemble_steps": "ensemble_scheduling.step",
    "gpu_accelerators": "optimization.execution_accelerators.gpu_execution_accelerator",
    "graph_level": "optimization.graph.level",
    "initial_states": "initial_state",
    "inputs": "input",
    "instance_groups": "instance_group",
    "is_global": "global",
    "iterative": "iterative_sequence",
    "operator_libraries": "model_operations.op_library_filename",
    "outputs": "output",
    "response_cache": "response_cache.enable",
    "slot_delay_microseconds": "direct.max_queue_delay_microseconds",
    "slot_utilization": "direct.minimum_slot_utilization",
    "source_inputs": "source_input",
    "states": "state",
    "target_names": "target_name",
}
"""Our name of a field -> its path in the message."""

_FIELDS: Mapping[tuple[type, str], _Convert] = {
    (ModelConfig, "parameters"): lambda message: {
        key: value.string_value for key, value in sorted(message.parameters.items())
    },
    (ModelConfig, "model_warmup"): lambda message: tuple(
        _converter(plain.WarmupSample)(sample) for sample in message.model_warmup if sample.batch_size > 0
    ),
    (ModelConfig, "purpose"): lambda _: plain.NO_PURPOSE,
    (ModelConfig, "scattered_outputs"): lambda message: {
        # An entry without a source is refused later, with the signature.
        name: entry.source_input[0]
        for entry in message.batch_output
        if entry.source_input
        for name in entry.target_name
    },
    (plain.QueuePolicy, "delays_timed_out"): lambda policy: policy.timeout_action == policy.DELAY,
    (ModelConfig, "histogram_buckets"): lambda message: {
        control.metric_identifier.family: tuple(control.histogram_options.buckets)
        for control in message.model_metrics.metric_control
    },
    (ModelConfig, "is_batch_size_written"): lambda message: message.HasField("max_batch_size"),
    # Known from the loaded model only.
    (ModelConfig, "is_batch_size_chosen"): lambda _: False,
    **{(kind, "any_rank"): lambda _: False for kind in (plain.InputConfig, plain.OutputConfig)},
    **{
        (kind, "reshape"): lambda tensor: tuple(tensor.reshape.shape) if tensor.HasField("reshape") else None
        for kind in (plain.InputConfig, plain.OutputConfig)
    },
    **{
        (kind, "preferred_batch_sizes"): lambda batching: tuple(sorted(set(batching.preferred_batch_size)))
        for kind in (plain.DynamicBatching, plain.OldestStrategy)
    },
    (plain.InputConfig, "format"): lambda tensor: messages.ModelInput.Format.Name(tensor.format),
    (plain.OutputConfig, "labels"): lambda _: (),
    # The text format cannot distinguish 0 from a missing value; the highest ready version fits both.
    (plain.EnsembleStep, "model_version"): lambda step: step.model_version or -1,
    (plain.WarmupSample, "inputs"): lambda sample: {
        name: _converter(plain.WarmupInput)(tensor) for name, tensor in sorted(sample.inputs.items())
    },
    (plain.WarmupSample, "count"): lambda sample: max(sample.count, 1),
    (plain.WarmupInput, "source"): lambda tensor: {"zero_data": "zero", "random_data": "random"}.get(
        tensor.WhichOneof("input_data_type") or "", f"file:{tensor.input_data_file}"
    ),
    # An input has one control; more have no effect.
    (plain.SequenceBatching, "controls"): lambda batching: tuple(
        _control(entry.name, entry.control[0]) for entry in batching.control_input if entry.control
    ),
}
"""(Dataclass, field) -> converter from the message that has the field."""

_KINDS: Mapping[object, _Convert] = {
    DataType: datatype_of_number,
    VersionPolicy: version_policy,
}
"""Type of a field -> converter from the field's value."""
