"""Configurations that both servers serve; what they make of them is compared."""

from __future__ import annotations

import numpy as np

from support.parity.configurations import Configuration
from support.parity.models import DATATYPES, ensemble, step, tensor

_INPUT = tensor("input", "IN", "FP32", [4])
_OUTPUT = tensor("output", "OUT", "FP32", [4])
_TENSORS = _INPUT + _OUTPUT
_MEMBER = {"INPUT0": "A", "INPUT1": "B"}, {"OUTPUT0": "SUM", "OUTPUT1": "DIFFERENCE"}
_ENDS = (
    tensor("input", "A", "INT32", [4])
    + tensor("input", "B", "INT32", [4])
    + tensor("output", "SUM", "INT32", [4])
    + tensor("output", "DIFFERENCE", "INT32", [4])
)


def _python(more: str = "", tensors: str = _TENSORS, max_batch_size: int = 8) -> str:
    return f'backend: "python"\nmax_batch_size: {max_batch_size}\n{tensors}{more}'


def good_configurations() -> tuple[Configuration, ...]:
    named = {
        **_heads(),
        **_tensors(),
        **_policies(),
        **_groups(),
        **_batching(),
        **_sequences(),
        **_ensembles(),
        **_others(),
    }
    texts = tuple(Configuration(f"good_{name}", text) for name, text in named.items())
    return (*texts, *_folders(), *_overrides())


def _heads() -> dict[str, str]:
    return {
        "plain": _python(),
        "whole": _python(max_batch_size=0),
        "platform_of_another": 'platform: "onnxruntime_onnx"\n' + _python(),
        "custom_operators": _python('model_operations { op_library_filename: "no.so" }'),
        "quotes": "backend: 'py' 'thon'\n" + _TENSORS,
        "parameters": _python(
            'parameters { key: "one" value { string_value: "1" } } parameters { key: "two" value { } }'
        ),
    }


def _tensors() -> dict[str, str]:
    types = "".join(
        tensor("input", f"INPUT_{name}", "STRING" if name == "BYTES" else name, [2])
        + tensor("output", f"OUTPUT_{name}", "STRING" if name == "BYTES" else name, [2])
        for name in DATATYPES
    )
    return {
        "every_type": _python(tensors=types),
        "variable": _python(tensors=tensor("input", "IN", "FP32", [-1, 3, -1]) + _OUTPUT),
        "reshape": _python(tensors=tensor("input", "IN", "FP32", [4], "reshape { shape: [2, 2] }") + _OUTPUT),
        "reshape_to_nothing": _python(tensors=tensor("input", "IN", "FP32", [1], "reshape { }") + _OUTPUT),
        "reshape_variable": _python(
            tensors=tensor("input", "IN", "FP32", [2, 4, -1, 6], "reshape { shape: [8, -1, 1, 6] }") + _OUTPUT
        ),
        "optional": _python(tensors=tensor("input", "IN", "FP32", [4], "optional: true") + _OUTPUT),
        "formats": _python(
            tensors=tensor("input", "IN", "FP32", [3, 2, 2], "format: FORMAT_NCHW")
            + tensor("input", "IN2", "FP32", [2, 2, 3], "format: FORMAT_NHWC")
            + _OUTPUT
        ),
        "ragged": _python(tensors=tensor("input", "IN", "FP32", [-1], "allow_ragged_batch: true") + _OUTPUT),
        "batch_tensors": _python(
            'batch_input { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "N" data_type: TYPE_FP32'
            ' source_input: "IN" } batch_output { target_name: "OUT" source_input: "IN" }'
        ),
        "no_input": _python(tensors=_OUTPUT, max_batch_size=0),
    }


def _policies() -> dict[str, str]:
    return {
        "latest_default": _python("version_policy { }"),
        "all": _python("version_policy { all { } }"),
        "specific": _python("version_policy { specific { versions: [1, 9, 1] } }"),
    }


def _groups() -> dict[str, str]:
    return {
        "cpu": _python("instance_group { kind: KIND_CPU }"),
        "count": _python("instance_group { kind: KIND_CPU count: 2 }"),
        "kind_auto": _python("instance_group { count: 1 }"),
        "two_groups": _python('instance_group [ { kind: KIND_CPU }, { name: "right" kind: KIND_CPU } ]'),
        "passive": _python("instance_group [ { kind: KIND_CPU }, { kind: KIND_CPU passive: true } ]"),
        "rate_limiter": _python(
            "instance_group { kind: KIND_CPU rate_limiter"
            ' { priority: 2 resources { name: "R" count: 1 global: true } } }'
        ),
        "host_policy": _python('instance_group { kind: KIND_CPU host_policy: "corner" }'),
        "secondary": _python("instance_group { kind: KIND_CPU secondary_devices { kind: KIND_NVDLA device_id: 1 } }"),
    }


def _batching() -> dict[str, str]:
    def batching(text: str) -> str:
        return _python(f"dynamic_batching {{ {text} }}")

    return {
        "dynamic": batching(""),
        "dynamic_whole": _python("dynamic_batching { }", max_batch_size=0),
        "preferred": batching("preferred_batch_size: [4, 2, 8]"),
        "levels": batching(
            "priority_levels: 3 default_priority_level: 2 priority_queue_policy"
            " { key: 1 value { max_queue_size: 4 timeout_action: DELAY default_timeout_microseconds: 7 } }"
        ),
        "queue_policy": batching(
            "default_queue_policy { timeout_action: REJECT default_timeout_microseconds: 1000000"
            " allow_timeout_override: true max_queue_size: 10 }"
        ),
    }


def _sequences() -> dict[str, str]:
    def batching(text: str, max_batch_size: int = 8) -> str:
        return _python(f"sequence_batching {{ {text} }}", max_batch_size=max_batch_size)

    controls = (
        'control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 1] } }'
        ' control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [0, 1] } }'
        ' control_input { name: "END" control { kind: CONTROL_SEQUENCE_END bool_false_true: [false, true] } }'
        ' control_input { name: "CORRID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }'
    )
    return {
        "sequences": batching(""),
        "sequences_direct": batching("direct { max_queue_delay_microseconds: 5 minimum_slot_utilization: 0.5 }"),
        "sequences_oldest": batching("oldest { max_candidate_sequences: 4 preferred_batch_size: [2, 4] }"),
        "sequences_idle": batching(f"max_sequence_idle_microseconds: 5000000 {controls}"),
    }


def _ensembles() -> dict[str, str]:
    whole = step("add_sub", *_MEMBER)
    more = step("add_sub", {"INPUT0": "A", "INPUT1": "mid"}, {"OUTPUT0": "SUM", "OUTPUT1": "DIFFERENCE"})
    return {
        "ensemble": ensemble(_ENDS, whole),
        "ensemble_whole": ensemble(_ENDS.replace("dims: [4]", "dims: [-1, 4]"), whole, max_batch_size=0),
        "ensemble_two_steps": ensemble(
            _ENDS, step("add_sub", {"INPUT0": "A", "INPUT1": "B"}, {"OUTPUT0": "mid"}), more
        ),
        "ensemble_any_dims": ensemble(_ENDS.replace("dims: [4]", "dims: [-1]"), whole),
        "ensemble_version": ensemble(_ENDS, step("add_sub", *_MEMBER, version=1)),
        "ensemble_member_whole": ensemble(_ENDS, step("add_sub_whole", *_MEMBER)),
        "ensemble_labels_of_member": ensemble(_ENDS, whole) + 'parameters { key: "k" value { string_value: "v" } }',
        "ensemble_version_policy": ensemble(_ENDS, whole) + "version_policy { all { } }",
    }


def _others() -> dict[str, str]:
    sample = 'inputs { key: "IN" value { data_type: TYPE_FP32 dims: [4] '
    return {
        "optimization": _python(
            "optimization { priority: PRIORITY_MAX graph { level: 1 } input_pinned_memory { enable: false }"
            " cuda { graphs: true } eager_batching: true gather_kernel_buffer_threshold: 3 }"
        ),
        "warmup_zero": _python(f'model_warmup {{ name: "z" batch_size: 2 {sample} zero_data: true }} }} }}'),
        "warmup_no_batch": _python(f'model_warmup {{ name: "n" {sample} zero_data: true }} }} }}', max_batch_size=0),
        "decoupled": _python("model_transaction_policy { decoupled: true }"),
        "metrics": _python(
            'model_metrics { metric_control { metric_identifier { family: "nv_inference_first_response_histogram_ms" }'
            " histogram_options { buckets: [1, 2.5] } } }"
        ),
        "cached": _python("response_cache { enable: true }"),
    }


def _folders() -> tuple[Configuration, ...]:
    four = np.array([1, 2, 3, 4], dtype=np.float32).tobytes()
    labelled = _python(tensors=_INPUT + tensor("output", "OUT", "FP32", [4], 'label_filename: "labels.txt"'))
    warm = _python(
        'model_warmup { name: "f" batch_size: 1 inputs { key: "IN" value'
        ' { data_type: TYPE_FP32 dims: [4] input_data_file: "four" } } }'
    )
    return (
        Configuration("good_labels", labelled, files={"labels.txt": b"a\nb\nc\nd\n"}),
        Configuration("good_warmup_file", warm, files={"warmup/four": four}),
        Configuration("good_version_zero", _python(), versions=("0",)),
        Configuration("good_leading_zeros", _python("version_policy { all { } }"), versions=("02", "1", "10", "x")),
        Configuration("good_many_versions", _python("version_policy { latest { num_versions: 2 } }"), ("1", "3", "20")),
        Configuration("good_no_config", None, script="", files={"1/model.py": _COMPLETING}),
        Configuration("good_completed", 'backend: "python"', script="", files={"1/model.py": _COMPLETING}),
        Configuration(
            "good_completed_partly", "max_batch_size: 2\n" + _INPUT, script="", files={"1/model.py": _COMPLETING}
        ),
    )


_COMPLETING = b"""
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [4]})
        config.add_output({"name": "OUT", "data_type": "TYPE_FP32", "dims": [4]})
        config.set_max_batch_size(2)
        config.set_dynamic_batching()
        return config

    def execute(self, requests):
        return []
"""


def _overrides() -> tuple[Configuration, ...]:
    tensors = (
        '"input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [4]}],'
        ' "output": [{"name": "OUT", "data_type": 11, "dims": ["4"]}]'
    )
    overrides = {
        "plain": f'{{"backend": "python", "max_batch_size": 2, {tensors}}}',
        "camel_case": f'{{"backend": "python", "maxBatchSize": 2, {tensors.replace("data_type", "dataType")}}}',
        "nulls": f'{{"backend": "python", "max_batch_size": null, "platform": null, {tensors}}}',
        "maps": f'{{"backend": "python", {tensors}, "parameters": {{"k": {{"string_value": "v"}}}}}}',
        "duration": f'{{"backend": "python", "max_batch_size": 4, {tensors},'
        ' "dynamicBatching": {"maxQueueDelayMicroseconds": "100"}}',
        "unlike_file": f'{{"backend": "python", {tensors.replace("[4]", "[9]")}}}',
        "twice": f'{{"backend": "python", "max_batch_size": 1, "max_batch_size": 2, {tensors}}}',
    }
    return tuple(Configuration(f"good_override_{name}", _python(), override=text) for name, text in overrides.items())
