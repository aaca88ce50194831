from __future__ import annotations

import pytest

from rocserve.backends.registry import discover_backends
from rocserve.config.pbtxt import parse_model_config
from rocserve.config.validation import check_supported
from rocserve.core.errors import ServeError, StatusCode

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
