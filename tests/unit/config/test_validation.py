from __future__ import annotations

import pytest

from rocserve.backends.registry import discover_backends
from rocserve.config.completion import normalise
from rocserve.config.pbtxt import parse_model_config
from rocserve.config.validation import check_model_config, check_supported
from rocserve.core.errors import ServeError, StatusCode

_GOOD = 'name: "m" backend: "onnxruntime" '


def _fault(text: str) -> str:
    message = parse_model_config(text, "config.pbtxt")
    normalise(message, None)
    with pytest.raises(ServeError) as raised:
        check_model_config(message)
    assert raised.value.code is StatusCode.INVALID_ARGUMENT
    return raised.value.text


def _input(fields: str) -> str:
    return f"{_GOOD} input {{ {fields} }}"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "model configuration must specify 'name'"),
        (
            'name: "m" platform: "ensemble" backend: "b" ensemble_scheduling { }',
            "Ensemble model 'm' must have platform type 'ensemble' and empty backend type",
        ),
        (
            'name: "m" platform: "onnx_onnxv1" ensemble_scheduling { }',
            "ensemble scheduling cannot be set for model 'm' whose platform is not ensemble",
        ),
        ('name: "m" platform: "ensemble"', "ensemble scheduling must be set for ensemble m whose platform is ensemble"),
        (_GOOD + "max_batch_size: -1", "'max_batch_size' must be non-negative value for m"),
    ],
)
def test_model(text: str, fault: str) -> None:
    assert _fault(text) == fault


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ("", "model input must specify 'name' for m"),
        ('name: "x" data_type: TYPE_INVALID dims: 1', "model input 'x' must specify 'data_type' for m"),
        (
            'name: "x" data_type: TYPE_FP32 dims: -2',
            "model input 'x' dimension must be integer >= 1, or -1 to indicate a variable-size dimension for m",
        ),
        (
            'name: "x" data_type: TYPE_FP32 dims: 4 reshape { shape: [2, 0] }',
            "model input 'x' reshape dimensions must be integer >= 1, or -1 to indicate a variable-size dimension"
            " for m",
        ),
        (
            'name: "x" data_type: TYPE_FP32 dims: [2, -1] reshape { shape: 5 }',
            "model input 'x' has different size for dims and reshape for m",
        ),
    ],
)
def test_input(fields: str, fault: str) -> None:
    assert _fault(_input(fields)) == fault


def test_each_name_once() -> None:
    tensor = '{ name: "x" data_type: TYPE_FP32 dims: 1 }'
    assert _fault(_GOOD + f"input [ {tensor}, {tensor} ]") == (
        "model input 'x' is specified 2 times for m; each name may occur once"
    )
    assert _fault(_GOOD + f"output [ {tensor}, {tensor} ]").startswith("model output 'x' is specified 2 times")


@pytest.mark.parametrize(
    "reshape", ["dims: [2, 4, -1, 6] reshape { shape: [8, -1, 1, 6] }", "dims: [6] reshape { shape: [2, 3] }"]
)
def test_reshapes_that_keep_every_element(reshape: str) -> None:
    message = parse_model_config(_input(f'name: "x" data_type: TYPE_FP32 {reshape}'), "config.pbtxt")
    normalise(message, None)
    check_model_config(message)


def test_empty_reshape_of_a_batching_model() -> None:
    text = _input('name: "x" data_type: TYPE_FP32 dims: 1 reshape { }') + " max_batch_size: 2"
    message = parse_model_config(text, "config.pbtxt")
    normalise(message, None)
    check_model_config(message)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ("preferred_batch_size: [4, 0]", "dynamic batching preferred size must be positive for m"),
        ("preferred_batch_size: [4, 9]", "dynamic batching preferred size must be <= max batch size for m"),
        ("priority_levels: 3", "default priority level must be in range [1, 3] for m"),
        ("priority_levels: 3 default_priority_level: 4", "default priority level must be in range [1, 3] for m"),
        (
            "priority_levels: 2 default_priority_level: 1 priority_queue_policy { key: 3 value { } }",
            "priority queue policy must have priority level in range [1, 2] for m",
        ),
        (
            "priority_levels: 2 default_priority_level: 1 preserve_ordering: true",
            "Only one priority level is allowed when 'preserve_ordering' is true for m",
        ),
        (
            "preserve_ordering: true default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 1 }",
            "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for m",
        ),
        (
            "preserve_ordering: true priority_levels: 1 default_priority_level: 1 priority_queue_policy"
            " { key: 1 value { timeout_action: DELAY default_timeout_microseconds: 1 } }",
            "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for m",
        ),
    ],
)
def test_dynamic_batching(fields: str, fault: str) -> None:
    assert _fault(_GOOD + f"max_batch_size: 8 dynamic_batching {{ {fields} }}") == fault


def test_preferred_sizes_without_batching() -> None:
    assert _fault(_GOOD + "dynamic_batching { preferred_batch_size: 4 }") == (
        "dynamic batching preferred size must be <= max batch size for m"
    )


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ("", "metric control must specify 'metric_identifier'"),
        ("metric_identifier { }", "metric identifier must specify non-empty 'family'"),
        ('metric_identifier { family: "f" }', "metric control must specify 'histogram_options'"),
        (
            'metric_identifier { family: "f" } histogram_options { }',
            "histogram options must specify non-empty 'buckets'",
        ),
    ],
)
def test_model_metrics(fields: str, fault: str) -> None:
    assert _fault(_GOOD + f"model_metrics {{ metric_control {{ {fields} }} }}") == fault


_REGISTRY = discover_backends()


@pytest.mark.parametrize(
    ("backend", "fields", "setting"),
    [
        ("onnx", "model_transaction_policy { decoupled: true }", "model_transaction_policy.decoupled"),
        ("rocal", "batch_input { }", "batch_input"),
        ("rocal", "batch_output { }", "batch_output"),
        ("migraphx", 'input { name: "x" allow_ragged_batch: true }', "allow_ragged_batch of input 'x'"),
        ("migraphx", 'model_operations { op_library_filename: "a.so" }', "model_operations.op_library_filename"),
    ],
)
def test_what_would_change_answers_is_refused(backend: str, fields: str, setting: str) -> None:
    with pytest.raises(ServeError) as raised:
        check_supported(parse_model_config(f'name: "m" {fields}', "config.pbtxt"), _REGISTRY.find("", backend))
    assert raised.value.code is StatusCode.UNIMPLEMENTED
    assert raised.value.text.startswith(f"model 'm': {setting} is not supported by this version of rocserve; ")


def test_hints_are_named_in_one_warning() -> None:
    text = """
    name: "m"
    runtime: "r"
    metric_tags { key: "team" value: "blue" }
    model_metrics {
      metric_control { metric_identifier { family: "nv_other" } histogram_options { buckets: [ 1 ] } }
      metric_control { metric_identifier { family: "rocserve_batch_size" } histogram_options { buckets: [ 1 ] } }
    }
    optimization {
      graph { level: 1 }
      cuda { graphs: true }
      input_pinned_memory { enable: true }
      execution_accelerators { gpu_execution_accelerator { name: "migraphx" } }
    }
    response_cache { enable: true }
    cc_model_filenames { key: "gfx90a" value: "a" }
    instance_group { host_policy: "p" rate_limiter { priority: 1 } profile: "0" secondary_devices { } }
    """
    message = parse_model_config(text, "config.pbtxt")
    start = "model 'm': settings without effect in this version of rocserve:"
    assert check_supported(message, _REGISTRY.find("", "migraphx")) == (
        f"{start} optimization.graph, optimization.cuda, instance_group.secondary_devices, instance_group.profile,"
        " runtime, model_metrics of 'nv_other'",
    )
    assert check_supported(message, _REGISTRY.find("", "onnx")) == (
        f"{start} optimization.cuda, instance_group.secondary_devices, instance_group.profile, runtime,"
        " model_metrics of 'nv_other'",
    )


def test_nothing_to_say() -> None:
    text = """
    name: "m" response_cache { } model_transaction_policy { decoupled: false }
    optimization { input_pinned_memory { enable: true } output_pinned_memory { enable: true } }
    """
    assert check_supported(parse_model_config(text, "config.pbtxt"), _REGISTRY.find("", "onnx")) == ()
