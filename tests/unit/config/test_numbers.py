"""Every number of a configuration at 0, -1, the ends of its type and beyond: served, or refused with a text. A
number by which planning never ended would reach the test's time limit."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from support.machine import ToldMachine

from rocserve.backends.registry import discover_backends
from rocserve.config.definition import FolderReading, complete_definition
from rocserve.core.errors import ServeError
from rocserve.core.requests import Signature
from rocserve.core.statistics import ModelStatistics
from rocserve.plane.loop import PlaneLoop
from rocserve.protocol.model_config_pb2 import ModelConfig
from rocserve.repository.engine_plan import plan_engine
from rocserve.repository.version_loader import new_scheduler
from rocserve.scheduling.queue import QueueLimits
from rocserve.scheduling.scheduler import SchedulerParts

_INPUT = 'input { name: "IN" data_type: TYPE_FP32 dims: [ 4 ] }\n'
_OUTPUT = 'output { name: "OUT" data_type: TYPE_FP32 dims: [ 4 ] }\n'
_HEAD = 'backend: "python"\nmax_batch_size: 8\n'
_MODEL = _HEAD + _INPUT + _OUTPUT
_LEVELS = _MODEL + "dynamic_batching { priority_levels: 4 default_priority_level: 1 %s }\n"
_SEQUENCES = _MODEL + "sequence_batching { %s }\n"
_CONTROL = _SEQUENCES % 'control_input { name: "C" control { %s } }'
_STATE = _SEQUENCES % 'state { input_name: "S" output_name: "T" %s }'
_INITIAL = _STATE % 'data_type: TYPE_FP32 dims: [ 4 ] initial_state { name: "i" zero_data: true %s }'
_SPEC = _MODEL + "optimization { cuda { graph_spec { %s } } }\n"
_GROUP = _MODEL + "instance_group { %s }\n"
_WARMUP = _MODEL + 'model_warmup { name: "w" %s }\n'
_SAMPLE = 'inputs { key: "IN" value { data_type: TYPE_FP32 dims: [ 4 ] zero_data: true } }'
_BATCH_INPUT = _MODEL + 'batch_input { target_name: "B" source_input: "IN" %s }\n'

TEMPLATES: dict[str, str] = {
    "max_batch_size": 'backend: "python"\n' + _INPUT + _OUTPUT + "max_batch_size: @\n",
    "version_policy.latest.num_versions": _MODEL + "version_policy { latest { num_versions: @ } }\n",
    "version_policy.specific.versions": _MODEL + "version_policy { specific { versions: [ 1, @ ] } }\n",
    "input.data_type": _HEAD + _OUTPUT + 'input { name: "IN" data_type: @ dims: [ 4 ] }\n',
    "input.format": _HEAD + _OUTPUT + 'input { name: "IN" data_type: TYPE_FP32 dims: [ 4, 4, 4 ] format: @ }\n',
    "input.dims": _HEAD + _OUTPUT + 'input { name: "IN" data_type: TYPE_FP32 dims: [ 4, @ ] }\n',
    "input.reshape.shape": _HEAD
    + _OUTPUT
    + 'input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: @ } }\n',
    "output.data_type": _HEAD + _INPUT + 'output { name: "OUT" data_type: @ dims: [ 4 ] }\n',
    "output.dims": _HEAD + _INPUT + 'output { name: "OUT" data_type: TYPE_FP32 dims: [ 4, @ ] }\n',
    "output.reshape.shape": _HEAD
    + _INPUT
    + 'output { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: @ } }\n',
    "batch_input.kind": _BATCH_INPUT % "kind: @ data_type: TYPE_FP32",
    "batch_input.data_type": _BATCH_INPUT % "kind: BATCH_ELEMENT_COUNT data_type: @",
    "batch_output.kind": _MODEL + 'batch_output { target_name: "OUT" source_input: "IN" kind: @ }\n',
    "optimization.graph.level": _MODEL + "optimization { graph { level: @ } }\n",
    "optimization.priority": _MODEL + "optimization { priority: @ }\n",
    "optimization.cuda.graph_spec.batch_size": _SPEC % "batch_size: @",
    "optimization.cuda.graph_spec.input.value.dim": _SPEC % 'input { key: "IN" value { dim: @ } }',
    "optimization.cuda.graph_spec.graph_lower_bound.batch_size": _SPEC % "graph_lower_bound { batch_size: @ }",
    "optimization.cuda.graph_spec.graph_lower_bound.input.value.dim": _SPEC
    % 'graph_lower_bound { input { key: "IN" value { dim: @ } } }',
    "optimization.gather_kernel_buffer_threshold": _MODEL + "optimization { gather_kernel_buffer_threshold: @ }\n",
    "dynamic_batching.preferred_batch_size": _MODEL + "dynamic_batching { preferred_batch_size: @ }\n",
    "dynamic_batching.max_queue_delay_microseconds": _MODEL + "dynamic_batching { max_queue_delay_microseconds: @ }\n",
    "dynamic_batching.priority_levels": _MODEL + "dynamic_batching { default_priority_level: 1 priority_levels: @ }\n",
    "dynamic_batching.default_priority_level": _MODEL
    + "dynamic_batching { priority_levels: 18446744073709551615 default_priority_level: @ }\n",
    "dynamic_batching.default_queue_policy.timeout_action": _LEVELS
    % "default_queue_policy { default_timeout_microseconds: 60000000 timeout_action: @ }",
    "dynamic_batching.default_queue_policy.default_timeout_microseconds": _LEVELS
    % "default_queue_policy { default_timeout_microseconds: @ }",
    "dynamic_batching.default_queue_policy.max_queue_size": _LEVELS % "default_queue_policy { max_queue_size: @ }",
    "dynamic_batching.priority_queue_policy.key": _MODEL
    + "dynamic_batching { priority_levels: 18446744073709551615 default_priority_level: 1"
    " priority_queue_policy { key: @ value { max_queue_size: 9 } } }\n",
    "dynamic_batching.priority_queue_policy.value.timeout_action": _LEVELS
    % "priority_queue_policy { key: 1 value { default_timeout_microseconds: 60000000 timeout_action: @ } }",
    "dynamic_batching.priority_queue_policy.value.default_timeout_microseconds": _LEVELS
    % "priority_queue_policy { key: 1 value { default_timeout_microseconds: @ } }",
    "dynamic_batching.priority_queue_policy.value.max_queue_size": _LEVELS
    % "priority_queue_policy { key: 1 value { max_queue_size: @ } }",
    "sequence_batching.max_sequence_idle_microseconds": _SEQUENCES % "max_sequence_idle_microseconds: @",
    "sequence_batching.direct.max_queue_delay_microseconds": _SEQUENCES
    % "direct { minimum_slot_utilization: 0.5 max_queue_delay_microseconds: @ }",
    "sequence_batching.direct.minimum_slot_utilization": _SEQUENCES % "direct { minimum_slot_utilization: @ }",
    "sequence_batching.oldest.max_candidate_sequences": _SEQUENCES % "oldest { max_candidate_sequences: @ }",
    "sequence_batching.oldest.preferred_batch_size": _SEQUENCES % "oldest { preferred_batch_size: @ }",
    "sequence_batching.oldest.max_queue_delay_microseconds": _SEQUENCES % "oldest { max_queue_delay_microseconds: @ }",
    "sequence_batching.control_input.control.kind": _CONTROL % "int32_false_true: [ 0, 1 ] kind: @",
    "sequence_batching.control_input.control.int32_false_true": _CONTROL
    % "kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, @ ]",
    "sequence_batching.control_input.control.fp32_false_true": _CONTROL
    % "kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, @ ]",
    "sequence_batching.control_input.control.data_type": _CONTROL % "kind: CONTROL_SEQUENCE_CORRID data_type: @",
    "sequence_batching.state.data_type": _STATE % "dims: [ 4 ] data_type: @",
    "sequence_batching.state.dims": _STATE % "data_type: TYPE_FP32 dims: [ 4, @ ]",
    "sequence_batching.state.initial_state.data_type": _INITIAL % "dims: [ 4 ] data_type: @",
    "sequence_batching.state.initial_state.dims": _INITIAL % "data_type: TYPE_FP32 dims: [ @ ]",
    "ensemble_scheduling.step.model_version": 'platform: "ensemble"\nmax_batch_size: 8\n'
    + _INPUT
    + _OUTPUT
    + 'ensemble_scheduling { step { model_name: "member" input_map { key: "IN" value: "IN" }'
    ' output_map { key: "OUT" value: "OUT" } model_version: @ } }\n',
    "ensemble_scheduling.max_inflight_requests": 'platform: "ensemble"\nmax_batch_size: 8\n'
    + _INPUT
    + _OUTPUT
    + 'ensemble_scheduling { max_inflight_requests: @ step { model_name: "member" model_version: -1'
    ' input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" } } }\n',
    "instance_group.kind": _GROUP % "count: 1 kind: @",
    "instance_group.count": _GROUP % "kind: KIND_CPU count: @",
    "instance_group.gpus": _GROUP % "kind: KIND_CPU gpus: @",
    "instance_group.rate_limiter.priority": _GROUP % "kind: KIND_CPU rate_limiter { priority: @ }",
    "instance_group.rate_limiter.resources.count": _GROUP
    % 'kind: KIND_CPU rate_limiter { resources { name: "R" count: @ } }',
    "instance_group.secondary_devices.kind": _GROUP % "kind: KIND_CPU secondary_devices { kind: @ }",
    "instance_group.secondary_devices.device_id": _GROUP % "kind: KIND_CPU secondary_devices { device_id: @ }",
    "model_warmup.batch_size": _WARMUP % f"{_SAMPLE} batch_size: @",
    "model_warmup.count": _WARMUP % f"{_SAMPLE} batch_size: 1 count: @",
    "model_warmup.inputs.value.data_type": _WARMUP
    % 'batch_size: 1 inputs { key: "IN" value { dims: [ 4 ] zero_data: true data_type: @ } }',
    "model_warmup.inputs.value.dims": _WARMUP
    % 'batch_size: 1 inputs { key: "IN" value { data_type: TYPE_FP32 dims: [ @ ] zero_data: true } }',
    "model_metrics.metric_control.histogram_options.buckets": _MODEL
    + 'model_metrics { metric_control { metric_identifier { family: "nv_inference_first_response_histogram_ms" }'
    " histogram_options { buckets: [ @ ] } } }\n",
}
"""By the field's path: a configuration of a Python model (or of an ensemble of one) with "@" in the number's place."""

_INTEGERS = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_ENUM: (-(2**31), 2**31 - 1),
}
_FRACTIONS = {FieldDescriptor.TYPE_FLOAT: "3.4028234e38", FieldDescriptor.TYPE_DOUBLE: "1.7976931348623157e308"}


def numbers_of(message: Descriptor, path: str = "") -> Iterator[tuple[str, FieldDescriptor]]:
    """The paths of all number fields, enumerations included."""
    for field in message.fields:
        here = f"{path}{field.name}"
        if field.message_type is not None:
            yield from numbers_of(field.message_type, f"{here}.")
        elif field.type in _INTEGERS or field.type in _FRACTIONS:
            yield here, field


def values_of(field: FieldDescriptor) -> list[str]:
    """0, -1, the ends of the type, one beyond each, and for an enumeration a value that it does not have."""
    if field.type in _FRACTIONS:
        largest = _FRACTIONS[field.type]
        return ["0", "-1", largest, f"-{largest}", "1e400", "inf", "nan"]
    least, most = _INTEGERS[field.type]
    values: dict[int, Any] = dict.fromkeys((0, -1, least, most, least - 1, most + 1))
    if field.enum_type is not None:
        values |= dict.fromkeys((max(field.enum_type.values_by_number), max(field.enum_type.values_by_number) + 1))
    return [str(value) for value in values]


def is_of_type(field: FieldDescriptor, value: str) -> bool:
    """Whether the field's type has the value; for an enumeration, whether the value has a name."""
    if field.type in _FRACTIONS:
        return True
    if field.enum_type is not None:
        return int(value) in field.enum_type.values_by_number
    least, most = _INTEGERS[field.type]
    return least <= int(value) <= most


def configurations(path: str) -> Iterator[tuple[str, str]]:
    """Each value to try for a field, with a configuration that contains it."""
    for value in values_of(dict(numbers_of(ModelConfig.DESCRIPTOR))[path]):
        yield value, TEMPLATES[path].replace("@", value)


LOG = logging.getLogger("test")
FIELDS: dict[str, FieldDescriptor] = dict(numbers_of(ModelConfig.DESCRIPTOR))
REGISTRY = discover_backends()
MACHINE = ToldMachine(instances=16)

LOW32, HIGH32, LOW64, HIGH64 = str(-(2**31)), str(2**31 - 1), str(-(2**63)), str(2**63 - 1)
_DIMENSION = "must be integer >= 1, or -1 to indicate a variable-size dimension"
_RANGE = "sequence batching minimum slot utilization must be in range"
_RESHAPE = {"0": _DIMENSION, "-1": "has different size", LOW64: _DIMENSION, HIGH64: "has different size"}
_DIMS = {"0": _DIMENSION, LOW64: _DIMENSION, HIGH64: f"bytes, at most {HIGH64} are possible"}
_POSITIVE = {
    "0": "must be positive",
    "-1": "must be positive",
    LOW32: "must be positive",
    HIGH32: "must be <= max batch",
}
_NO_TYPE = {"0": "must specify 'data_type'"}
_NO_GPUS = "has kind KIND_CPU but specifies one or more GPUs"

REFUSED: dict[str, dict[str, str]] = {
    "max_batch_size": {"-1": "must be non-negative", LOW32: "must be non-negative"},
    "input.data_type": _NO_TYPE,
    "input.dims": _DIMS,
    "input.reshape.shape": _RESHAPE,
    "output.data_type": _NO_TYPE,
    "output.dims": _DIMS,
    "output.reshape.shape": _RESHAPE,
    "batch_input.data_type": dict.fromkeys(("0", "14"), "must be TYPE_INT32 or TYPE_FP32"),
    "dynamic_batching.preferred_batch_size": _POSITIVE,
    "dynamic_batching.default_priority_level": {"0": "must be in range [1, 18446744073709551615]"},
    "dynamic_batching.priority_queue_policy.key": {"0": "must have priority level in range"},
    "sequence_batching.direct.minimum_slot_utilization": dict.fromkeys(
        ("-1", "3.4028234e38", "-3.4028234e38", "1e400", "inf", "nan"), _RANGE
    ),
    "sequence_batching.oldest.max_candidate_sequences": dict.fromkeys(("-1", LOW32), "must not be negative"),
    "sequence_batching.oldest.preferred_batch_size": _POSITIVE,
    "sequence_batching.control_input.control.kind": {"3": "must not specify either"},
    "sequence_batching.control_input.control.data_type": dict.fromkeys(("0", "14"), "unexpected data type for control"),
    "sequence_batching.state.data_type": {"0": "must specify 'data_type'"},
    "sequence_batching.state.dims": {
        "0": _DIMENSION,
        LOW64: _DIMENSION,
        HIGH64: "bytes, at most 2147483647 are possible",
    },
    "sequence_batching.state.initial_state.data_type": dict.fromkeys(("0", "14"), "does not match the state data type"),
    "sequence_batching.state.initial_state.dims": {
        "-1": "contains variable dimensions",
        **dict.fromkeys(("0", LOW64, HIGH64), "doesn't match 'state' dim description"),
    },
    "instance_group.count": {
        HIGH32: "ask for 2147483647 instances on the CPU, at most 16 are possible here; lower 'count', or raise"
        " --max-model-instances"
    },
    "instance_group.gpus": dict.fromkeys(("0", "-1", LOW32, HIGH32), _NO_GPUS),
    "model_warmup.batch_size": {"4294967295": "has 4294967295 rows, at most 1000000 are possible"},
    "model_warmup.count": {"4294967295": "has 4294967295 runs, at most 10000 are possible"},
    "model_warmup.inputs.value.data_type": dict.fromkeys(("0", "14"), "data-type is"),
    "model_warmup.inputs.value.dims": {
        "0": "unexpected shape for input 'IN'",
        **dict.fromkeys(("-1", LOW64), "expects all variable-size dimensions are specified"),
        HIGH64: "bytes, at most 2147483647 are possible",
    },
    "model_metrics.metric_control.histogram_options.buckets": {"nan": "'buckets' that are numbers"},
}
"""By field and value, the refusal's text; values outside of the type are refused by the parser."""


def test_every_number_of_a_configuration_is_listed() -> None:
    assert set(TEMPLATES) == set(FIELDS)
    assert set(REFUSED) <= set(FIELDS)


@pytest.mark.parametrize("path", FIELDS)
def test_a_number_is_served_or_refused_in_words(path: str, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").touch()
    for value, text in configurations(path):
        (folder / "config.pbtxt").write_text(text)
        expected = REFUSED.get(path, {}).get(value, "")
        try:
            plan_whole(folder)
            refusal = ""
        except ServeError as error:
            refusal = error.text
        if is_of_type(FIELDS[path], value):
            assert bool(refusal) == bool(expected), f"{path}: {value}: {refusal or 'served'}"
            assert expected in refusal
        else:
            assert refusal.startswith("config.pbtxt:"), f"{path}: {value}: {refusal or 'served'}"


def plan_whole(folder: Path) -> None:
    """Do all that the server does with a configuration before it starts workers. Raises ServeError if it is refused."""
    (definition,) = FolderReading(folder, REGISTRY).definitions()
    if definition.backend is None:
        complete_definition(definition, None)
        return
    complete = complete_definition(definition, Signature((), (), supports_batching=False))
    plan_engine(complete, folder, MACHINE)
    plane = PlaneLoop(LOG)
    try:
        parts = SchedulerParts(complete.config, 1, ModelStatistics(), plane, QueueLimits(), LOG)
        scheduler = new_scheduler(parts)
        scheduler.attach(object())
        scheduler.close(lambda: None)
    finally:
        plane.stop()
