"""Configurations that must not be served, grouped by how Triton refuses them."""

from __future__ import annotations

from support.parity.configurations import Configuration
from support.parity.models import ensemble, step, tensor

_INPUT = tensor("input", "IN", "FP32", [4])
_OUTPUT = tensor("output", "OUT", "FP32", [4])
_TENSORS = _INPUT + _OUTPUT
_WRITTEN = '{ name: "IN" data_type: TYPE_FP32 dims: [4] '


def _python(more: str = "", tensors: str = _TENSORS, max_batch_size: int = 8) -> str:
    return f'backend: "python"\nmax_batch_size: {max_batch_size}\n{tensors}{more}'


READ = "read"
"""Triton cannot read the configuration, or a member does not fit: Triton's index names the folder only."""
VERSIONS = "versions"
"""There is no version to serve: Triton's index does not list the model."""
LOAD = "load"
"""A version fails to load."""


def bad_configurations() -> tuple[Configuration, ...]:
    """All bad configurations, each in its group."""
    groups = {
        READ: (
            _syntax(),
            _names_and_types(),
            _batching(),
            _sequences(),
            _ensembles(),
            _graphs(),
            _caches_metrics_and_agents(),
        ),
        VERSIONS: (_versions(),),
        LOAD: (_backends(), _tensors(), _dims(), _groups(), _batch_tensors(), _warmups()),
    }
    texts = tuple(
        Configuration(f"bad_{name}", text, group=group)
        for group, parts in groups.items()
        for part in parts
        for name, text in part.items()
    )
    return (*texts, *_folders(), *_overrides())


def _syntax() -> dict[str, str]:
    return {
        "open_brace": _python() + "instance_group {",
        "no_colon": 'backend "python"',
        "unknown_field": _python("no_such_field: 1"),
        "unknown_inner_field": _python(tensors=f"input {_WRITTEN} colour: 1 }}{_OUTPUT}"),
        "mistyped_field": _python("max_batchsize: 1"),
        "string_for_number": _python().replace("max_batch_size: 8", 'max_batch_size: "8"'),
        "number_for_string": "backend: 7",
        "unknown_enum_value": _python(tensors='input { name: "IN" data_type: TYPE_FLOAT dims: [4] }' + _OUTPUT),
        "enum_as_string": _python(tensors='input { name: "IN" data_type: "TYPE_FP32" dims: [4] }' + _OUTPUT),
        "bool_as_word": _python("model_transaction_policy { decoupled: maybe }"),
        "twice": _python("max_batch_size: 4"),
        "two_schedulers": _python("dynamic_batching { } sequence_batching { }"),
        "two_policies": _python("version_policy { all { } latest { } }"),
        "out_of_range": _python(max_batch_size=99999999999),
        "negative_unsigned": _python("dynamic_batching { max_queue_delay_microseconds: -1 }"),
        "float_for_int": _python("dynamic_batching { preferred_batch_size: 1.5 }"),
        "unclosed_string": 'backend: "python',
        "rubbish": "%%% this is no configuration",
        "control_characters": 'backend: "python" \x00',
        "not_a_map_entry": _python('parameters { name: "k" value { string_value: "v" } }'),
        "unknown_kind": _python("instance_group { kind: KIND_TPU }"),
        "version_out_of_range": _python("version_policy { specific { versions: [99999999999999999999] } }"),
        "parameter_without_message": _python('parameters { key: "k" value: "v" }'),
    }


def _names_and_types() -> dict[str, str]:
    return {
        "other_name": 'name: "another"\n' + _python(),
        "unknown_platform": 'platform: "nonesuch"\n' + _TENSORS,
        "negative_batch": _python(max_batch_size=-1),
    }


def _backends() -> dict[str, str]:
    return {
        "unknown_backend": 'backend: "nonesuch"\n' + _TENSORS,
        "foreign_backend": 'backend: "tensorrt"\n' + _TENSORS,
        "foreign_platform": 'platform: "tensorrt_plan"\n' + _TENSORS,
    }


def _tensors() -> dict[str, str]:
    return {
        "no_tensors": _python(tensors=""),
        "input_without_type": _python(tensors='input { name: "IN" dims: [4] }' + _OUTPUT),
        "input_without_dims": _python(tensors='input { name: "IN" data_type: TYPE_FP32 }' + _OUTPUT),
        "output_without_name": _python(tensors=_INPUT + "output { data_type: TYPE_FP32 dims: [4] }"),
        "input_twice": _python(tensors=_INPUT + _TENSORS),
        "output_twice": _python(tensors=_TENSORS + _OUTPUT),
        "shape_tensor_input": _python(tensors=f"input {_WRITTEN} is_shape_tensor: true }}{_OUTPUT}"),
        "non_linear_input": _python(tensors=f"input {_WRITTEN} is_non_linear_format_io: true }}{_OUTPUT}"),
        "format_of_vector": _python(tensors=f"input {_WRITTEN} format: FORMAT_NCHW }}{_OUTPUT}"),
        "label_file_missing": _python(
            tensors=_INPUT + tensor("output", "OUT", "FP32", [4], 'label_filename: "labels.txt"')
        ),
    }


def _dims() -> dict[str, str]:
    def with_input(dims: list[int], more: str = "") -> str:
        return tensor("input", "IN", "FP32", dims, more) + _OUTPUT

    def reshaped(dims: list[int], shape: list[int]) -> str:
        return with_input(dims, f"reshape {{ shape: {shape} }}")

    return {
        "dim_zero": _python(tensors=with_input([4, 0])),
        "reshape_empty_whole": _python(tensors=with_input([1], "reshape { }"), max_batch_size=0),
        "reshape_other_size": _python(tensors=reshaped([4], [2, 3])),
        "reshape_empty_of_many": _python(tensors=with_input([4], "reshape { }")),
        "reshape_more_variables": _python(tensors=reshaped([-1, 4], [-1, -1])),
        "reshape_other_trunks": _python(tensors=reshaped([2, -1, 6], [3, -1, 4])),
    }


def _versions() -> dict[str, str]:
    return {
        "specific_missing": _python("version_policy { specific { versions: [7] } }"),
        "specific_none": _python("version_policy { specific { } }"),
        "specific_negative": _python("version_policy { specific { versions: [-1] } }"),
        "latest_none": _python("version_policy { latest { } }"),
        "ensemble_no_version": ensemble(ENDS, step("add_sub", *MEMBER))
        + "version_policy { specific { versions: [7] } }",
    }


def _groups() -> dict[str, str]:
    return {
        "cpu_with_gpus": _python("instance_group { kind: KIND_CPU gpus: [0] }"),
        "model_with_gpus": _python("instance_group { kind: KIND_MODEL gpus: [0] }"),
        "gpu_without_gpus": _python("instance_group { kind: KIND_GPU }"),
        "gpu_not_there": _python("instance_group { kind: KIND_GPU gpus: [97] }"),
        "gpu_negative": _python("instance_group { kind: KIND_GPU gpus: [-1] }"),
        "profile": _python('instance_group { kind: KIND_CPU profile: ["0"] }'),
    }


def _batching() -> dict[str, str]:
    def batching(text: str) -> str:
        return _python(f"dynamic_batching {{ {text} }}")

    policy = "default_timeout_microseconds: 100 timeout_action: DELAY"
    return {
        "preferred_zero": batching("preferred_batch_size: [0]"),
        "preferred_negative": batching("preferred_batch_size: [-4]"),
        "preferred_too_big": batching("preferred_batch_size: [4, 9]"),
        "preferred_without_batching": _python("dynamic_batching { preferred_batch_size: [1] }", max_batch_size=0),
        "priority_default_missing": batching("priority_levels: 3"),
        "priority_default_too_big": batching("priority_levels: 3 default_priority_level: 4"),
        "priority_policy_too_big": batching(
            "priority_levels: 2 default_priority_level: 1 priority_queue_policy { key: 3 value { } }"
        ),
        "priority_policy_zero": batching(
            "priority_levels: 2 default_priority_level: 1 priority_queue_policy { key: 0 value { } }"
        ),
        "ordered_levels": batching("preserve_ordering: true priority_levels: 2 default_priority_level: 1"),
        "ordered_delay": batching(f"preserve_ordering: true default_queue_policy {{ {policy} }}"),
        "ordered_delay_of_level": batching(
            "preserve_ordering: true priority_levels: 1 default_priority_level: 1"
            f" priority_queue_policy {{ key: 1 value {{ {policy} }} }}"
        ),
        "unknown_timeout_action": batching("default_queue_policy { timeout_action: WAIT }"),
    }


def _sequences() -> dict[str, str]:
    def controls(*texts: str, more: str = "") -> str:
        return _python(f"sequence_batching {{ {' '.join(f'control_input {{ {text} }}' for text in texts)} {more} }}")

    start = "control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] }"
    corrid = "control { kind: CONTROL_SEQUENCE_CORRID"
    return {
        "control_without_name": controls(start),
        "control_tensor_twice": controls(f'name: "S" {start}', f'name: "S" {start}'),
        "control_kind_twice": controls(f'name: "S" {start}', f'name: "T" {start}'),
        "control_without_values": controls('name: "S" control { kind: CONTROL_SEQUENCE_START }'),
        "control_two_types": controls(
            'name: "S" control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] fp32_false_true: [0, 1] }'
        ),
        "control_one_int": controls('name: "S" control { kind: CONTROL_SEQUENCE_START int32_false_true: [1] }'),
        "control_three_floats": controls('name: "S" control { kind: CONTROL_SEQUENCE_END fp32_false_true: [0, 1, 2] }'),
        "control_one_bool": controls('name: "S" control { kind: CONTROL_SEQUENCE_READY bool_false_true: [true] }'),
        "corrid_with_values": controls(f'name: "C" {corrid} int32_false_true: [0, 1] data_type: TYPE_UINT64 }}'),
        "corrid_without_type": controls(f'name: "C" {corrid} }}'),
        "corrid_float": controls(f'name: "C" {corrid} data_type: TYPE_FP32 }}'),
        "corrid_twice": controls(
            f'name: "C" {corrid} data_type: TYPE_UINT64 }}', f'name: "D" {corrid} data_type: TYPE_UINT64 }}'
        ),
        "oldest_preferred_zero": controls(more="oldest { preferred_batch_size: [0] }"),
        "oldest_preferred_too_big": controls(more="oldest { preferred_batch_size: [9] }"),
        "slot_utilization": controls(more="direct { minimum_slot_utilization: 1.5 }"),
        "cached_sequences": _python("sequence_batching { } response_cache { enable: true }"),
    }


MEMBER = {"INPUT0": "A", "INPUT1": "B"}, {"OUTPUT0": "SUM", "OUTPUT1": "DIFFERENCE"}
ENDS = (
    tensor("input", "A", "INT32", [4])
    + tensor("input", "B", "INT32", [4])
    + tensor("output", "SUM", "INT32", [4])
    + tensor("output", "DIFFERENCE", "INT32", [4])
)


def _ensembles() -> dict[str, str]:
    """Ensembles with one mistake each."""
    whole = step("add_sub", *MEMBER)
    return {
        "ensemble_backend": 'backend: "python"\n' + ensemble(ENDS, whole),
        "ensemble_platform": _python(f"ensemble_scheduling {{ {whole} }}", ENDS),
        "ensemble_without_scheduling": f'platform: "ensemble"\n{ENDS}',
        "ensemble_groups": ensemble(ENDS, whole) + "instance_group { count: 1 }",
        "ensemble_optimization": ensemble(ENDS, whole) + "optimization { priority: PRIORITY_MAX }",
        "ensemble_without_steps": ensemble(ENDS),
        "ensemble_nameless_step": ensemble(ENDS, step("", *MEMBER)),
        "ensemble_no_input_map": ensemble(ENDS, step("add_sub", {}, MEMBER[1])),
        "ensemble_no_output_map": ensemble(ENDS, step("add_sub", MEMBER[0], {})),
        "ensemble_written_twice": ensemble(ENDS, whole, whole),
        "ensemble_input_unused": ensemble(tensor("input", "C", "INT32", [4]) + ENDS, whole),
        "ensemble_output_unknown": ensemble(ENDS + tensor("output", "X", "INT32", [4]), whole),
        "ensemble_output_unwritten": ensemble(ENDS, step("add_sub", {"INPUT0": "A", "INPUT1": "GAP"}, MEMBER[1])),
        "ensemble_tensor_unused": ensemble(ENDS, step("add_sub", MEMBER[0], {"OUTPUT0": "SUM", "OUTPUT1": "LOST"})),
        "ensemble_cycle_of_steps": ensemble(
            ENDS,
            step("add_sub", {"INPUT0": "A", "INPUT1": "BACK"}, {"OUTPUT0": "SUM", "OUTPUT1": "ON"}),
            step("add_sub", {"INPUT0": "ON", "INPUT1": "B"}, {"OUTPUT0": "BACK", "OUTPUT1": "DIFFERENCE"}),
        ),
    }


def _with(kind: str, name: str, dims: list[int]) -> str:
    """The ensemble, with another shape for one of its inputs or outputs."""
    return ENDS.replace(tensor(kind, name, "INT32", [4]), tensor(kind, name, "INT32", dims))


def _graphs() -> dict[str, str]:
    """Ensembles that do not fit their members."""

    def over(model: str, ends: str = ENDS, max_batch_size: int = 8) -> str:
        return ensemble(ends, step(model, *MEMBER), max_batch_size=max_batch_size)

    floats = ENDS.replace('"A" data_type: TYPE_INT32', '"A" data_type: TYPE_FP32')
    chained = step("add_sub", *MEMBER), step("floats", {"INPUT_FP32": "SUM"}, {"OUTPUT_FP32": "OUT"})
    return {
        "member_missing": over("nonesuch"),
        "members_missing": ensemble(
            ENDS,
            step("nonesuch", MEMBER[0], {"OUTPUT0": "SUM"}),
            step("nor_this", MEMBER[0], {"OUTPUT1": "DIFFERENCE"}),
        ),
        "member_version_missing": ensemble(ENDS, step("add_sub", *MEMBER, version=7)),
        "member_itself": ensemble(ENDS, step("bad_member_itself", *MEMBER)),
        "member_batch_too_small": over("add_sub", max_batch_size=16),
        "member_input_unknown": ensemble(
            ENDS, step("add_sub", {"INPUT0": "A", "INPUT1": "B", "INPUT2": "A"}, MEMBER[1])
        ),
        "member_output_unknown": ensemble(ENDS, step("add_sub", MEMBER[0], {"OUTPUT0": "SUM", "NONE": "DIFFERENCE"})),
        "member_input_unmapped": ensemble(
            ENDS.replace(tensor("input", "B", "INT32", [4]), ""), step("add_sub", {"INPUT0": "A"}, MEMBER[1])
        ),
        "member_input_type": over("add_sub", floats),
        "member_output_type": over(
            "add_sub", ENDS.replace('"SUM" data_type: TYPE_INT32', '"SUM" data_type: TYPE_FP32')
        ),
        "member_input_shape": over(
            "add_sub", ENDS.replace(tensor("input", "A", "INT32", [4]), tensor("input", "A", "INT32", [5]))
        ),
        "member_input_rank": over(
            "add_sub", ENDS.replace(tensor("input", "A", "INT32", [4]), tensor("input", "A", "INT32", [4, 1]))
        ),
        "member_output_shape": over(
            "add_sub", ENDS.replace(tensor("output", "SUM", "INT32", [4]), tensor("output", "SUM", "INT32", [9]))
        ),
        "members_disagree": ensemble(ENDS + tensor("output", "OUT", "FP32", [-1]), *chained),
    }


def _batch_tensors() -> dict[str, str]:
    def batch_input(text: str) -> str:
        return _python(f"batch_input {{ {text} }}")

    def batch_output(text: str) -> str:
        return _python(f"batch_output {{ {text} }}")

    return {
        "batch_input_no_source": batch_input('kind: BATCH_ELEMENT_COUNT target_name: "N" data_type: TYPE_INT32'),
        "batch_input_type": batch_input(
            'kind: BATCH_ELEMENT_COUNT target_name: "N" data_type: TYPE_INT16 source_input: "IN"'
        ),
        "batch_input_unknown_source": batch_input(
            'kind: BATCH_ELEMENT_COUNT target_name: "N" data_type: TYPE_INT32 source_input: "X"'
        ),
        "batch_output_unknown_source": batch_output('target_name: "OUT" source_input: "X"'),
        "batch_output_unknown_target": batch_output('target_name: "X" source_input: "IN"'),
        "batch_output_target_twice": batch_output('target_name: ["OUT", "OUT"] source_input: "IN"'),
    }


def _warmups() -> dict[str, str]:
    def warmup(text: str, batch_size: int = 1) -> str:
        return _python(f'model_warmup {{ name: "sample" batch_size: {batch_size} {text} }}')

    def sample(text: str, name: str = "IN") -> str:
        return f'inputs {{ key: "{name}" value {{ {text} }} }}'

    zeros = "data_type: TYPE_FP32 dims: [4] zero_data: true"
    return {
        "warmup_variable": warmup(sample("data_type: TYPE_FP32 dims: [-1] zero_data: true")),
        "warmup_no_data": warmup(sample("data_type: TYPE_FP32 dims: [4]")),
        "warmup_no_file": warmup(sample('data_type: TYPE_FP32 dims: [4] input_data_file: "none"')),
        "warmup_other_type": warmup(sample("data_type: TYPE_INT32 dims: [4] zero_data: true")),
        "warmup_other_shape": warmup(sample("data_type: TYPE_FP32 dims: [5] zero_data: true")),
        "warmup_unknown_input": warmup(sample(zeros) + sample(zeros, "X")),
        "warmup_missing_input": warmup(""),
        "warmup_batch_too_big": warmup(sample(zeros), 9),
    }


def _caches_metrics_and_agents() -> dict[str, str]:
    return {
        "warmup_of_ensemble": ensemble(ENDS, step("add_sub", *MEMBER)) + 'model_warmup { name: "s" batch_size: 1 }',
        "agent_unknown": _python('model_repository_agents { agents { name: "nonesuch" } }'),
        "cached_decoupled": _python("model_transaction_policy { decoupled: true } response_cache { enable: true }"),
        "metric_without_identifier": _python("model_metrics { metric_control { } }"),
        "metric_without_family": _python("model_metrics { metric_control { metric_identifier { } } }"),
        "metric_without_options": _python('model_metrics { metric_control { metric_identifier { family: "f" } } }'),
        "metric_without_buckets": _python(
            'model_metrics { metric_control { metric_identifier { family: "f" } histogram_options { } } }'
        ),
    }


def _folders() -> tuple[Configuration, ...]:
    """Configurations that do not fit the files in their folder."""
    return (
        Configuration("bad_no_versions", _python(), versions=(), group=VERSIONS),
        Configuration("bad_version_names", _python(), versions=("first", "v1"), group=VERSIONS),
        Configuration("bad_leading_zero", _python(), versions=("01",), group=VERSIONS),
        Configuration("bad_no_model_file", _python(), script="", group=LOAD),
        Configuration("bad_other_model_file", _python('default_model_filename: "other.py"'), group=LOAD),
        Configuration("bad_no_config", None, script="", group=READ),
        Configuration("bad_empty_config", "", script="", group=READ),
        Configuration("bad_script", _python(), script="", files={"1/model.py": b"this is no Python"}, group=LOAD),
        Configuration("bad_script_class", _python(), script="", files={"1/model.py": b"answer = 42\n"}, group=LOAD),
        Configuration("bad_warmup_size", _WARM_FILE, files={"warmup/short": b"1234"}, group=LOAD),
    )


_WARM_FILE = _python(
    'model_warmup { name: "sample" batch_size: 1 inputs { key: "IN" value'
    ' { data_type: TYPE_FP32 dims: [4] input_data_file: "short" } } }'
)


def _overrides() -> tuple[Configuration, ...]:
    """Mistakes in the configuration that a load request brings."""
    overrides = {
        "not_json": "{",
        "empty": "",
        "list": "[]",
        "word": '"python"',
        "unknown_field": '{"backend": "python", "no_such_field": 1}',
        "unknown_inner": '{"backend": "python", "input": [{"name": "IN", "colour": 1}]}',
        "wrong_type": '{"backend": "python", "max_batch_size": "many"}',
        "fraction": '{"backend": "python", "max_batch_size": 1.5}',
        "wrong_enum": '{"backend": "python", "input": [{"name": "IN", "data_type": "TYPE_FLOAT", "dims": [1]}]}',
        "list_for_object": '{"backend": "python", "optimization": []}',
        "other_name": '{"name": "another", "backend": "python"}',
        "two_schedulers": '{"backend": "python", "dynamic_batching": {}, "sequence_batching": {}}',
        "negative_unsigned": '{"backend": "python", "dynamic_batching": {"max_queue_delay_microseconds": -1}}',
        "number_for_bool": '{"backend": "python", "model_transaction_policy": {"decoupled": 1}}',
    }
    unread = tuple(
        Configuration(f"bad_override_{name}", _python(), override=text, group=READ) for name, text in overrides.items()
    )
    one = '{"backend": "python", "input": {"name": "IN"}}'
    return (*unread, Configuration("bad_override_object_for_list", _python(), override=one, group=LOAD))
