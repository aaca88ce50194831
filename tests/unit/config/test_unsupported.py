from __future__ import annotations

import pytest

from rocserve.config.pbtxt import parse_model_config
from rocserve.config.unsupported import check_supported
from rocserve.core.errors import ServeError, StatusCode


@pytest.mark.parametrize(
    ("fields", "setting"),
    [
        ("sequence_batching { }", "sequence_batching"),
        ("model_transaction_policy { decoupled: true }", "model_transaction_policy.decoupled"),
        ("batch_input { }", "batch_input"),
        ("batch_output { }", "batch_output"),
        ('input { name: "x" allow_ragged_batch: true }', "allow_ragged_batch of input 'x'"),
        ('model_operations { op_library_filename: "a.so" }', "model_operations.op_library_filename"),
        ('model_repository_agents { agents { name: "checksum" } }', "model_repository_agents"),
        (
            'ensemble_scheduling { step { model_name: "a" model_namespace: "n" } }',
            "model_namespace of the step 'a'",
        ),
        ('instance_group { name: "g" secondary_devices { } }', "secondary_devices of instance group 'g'"),
    ],
)
def test_what_would_change_answers_is_refused(fields: str, setting: str) -> None:
    with pytest.raises(ServeError) as raised:
        check_supported(parse_model_config(f'name: "m" {fields}', "config.pbtxt"))
    assert raised.value.code is StatusCode.UNIMPLEMENTED
    assert raised.value.text.startswith(f"model 'm': {setting} is not supported by this version of rocserve; ")


def test_hints_are_named_in_one_warning() -> None:
    text = """
    name: "m"
    runtime: "r"
    optimization {
      graph { level: 1 }
      cuda { graphs: true }
      input_pinned_memory { enable: true }
      execution_accelerators { gpu_execution_accelerator { name: "migraphx" } }
    }
    response_cache { enable: true }
    cc_model_filenames { key: "7.5" value: "a" }
    metric_tags { key: "a" value: "b" }
    instance_group { host_policy: "p" rate_limiter { priority: 1 } }
    model_metrics { }
    """
    assert check_supported(parse_model_config(text, "config.pbtxt")) == (
        "model 'm': settings without effect in this version of rocserve: optimization.graph,"
        " optimization.cuda, instance_group.host_policy, runtime,"
        " cc_model_filenames, metric_tags, model_metrics",
    )


def test_nothing_to_say() -> None:
    text = """
    name: "m" response_cache { } model_transaction_policy { decoupled: false }
    optimization { input_pinned_memory { enable: true } output_pinned_memory { enable: true } }
    """
    assert check_supported(parse_model_config(text, "config.pbtxt")) == ()
