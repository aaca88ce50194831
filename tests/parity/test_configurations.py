"""What both servers make of good and bad configurations, each in its own folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.parity.bad_configurations import ENDS, MEMBER, READ, VERSIONS, bad_configurations
from support.parity.configurations import Configuration, IndexRows, described, dropped
from support.parity.differences import Difference
from support.parity.exchange import Exchange, Outcome
from support.parity.models import DATATYPES, ParityModel, ensemble, parity_models, python, step, tensor, write_model
from support.parity.pair import Pair, Paired, running_servers

from benchmarks.triton_peer import TritonPeer


@dataclass(frozen=True, slots=True)
class SaysMore(Difference):
    """The status is the same, and rocserve's text contains Triton's; also in the index."""

    def explains(self, triton: Outcome | None, rocserve: Outcome) -> bool:
        """See Difference."""
        if triton is None or triton.status != rocserve.status or not _is_within(triton.text, rocserve.text):
            return False
        if not isinstance(triton.answer, list):
            return triton.answer == rocserve.answer
        rows = zip(triton.answer, rocserve.answer, strict=False)
        return len(triton.answer) == len(rocserve.answer) and all(_is_row_within(*row) for row in rows)


def _is_within(triton: str, rocserve: str) -> bool:
    return triton.rstrip(";\n ") in rocserve


def _is_row_within(triton: dict[str, Any], rocserve: dict[str, Any]) -> bool:
    rest = [{key: value for key, value in row.items() if key != "reason"} for row in (triton, rocserve)]
    return rest[0] == rest[1] and _is_within(triton.get("reason", ""), rocserve.get("reason", ""))


_READ = "^INTERNAL: failed to load '.*', failed to poll from model repository$"
_REFUSED = r"^INVALID_ARGUMENT: load failed for model|^OK:  \[\{.*'state': 'UNAVAILABLE'"
_SERVED = r"^OK:  (\{\}|\[\{.*'state': 'READY'\}\])$"
_NAMED = r"^OK:  \[\{'name': '\w+'\}\]$"

CONFIGURATION_DIFFERENCES: tuple[Difference, ...] = (
    Difference(
        "The index says why a configuration cannot be read, or which member an ensemble lacks; Triton's log alone does",
        [entry.name for entry in bad_configurations() if entry.group == READ],
        _NAMED,
        r"^OK:  \[\{'name': '\w+',( 'version': '1',)? 'state': 'UNAVAILABLE', 'reason': .+\}\]$",
    ),
    Difference(
        "A model without a version to serve stays in the index with the reason",
        [entry.name for entry in bad_configurations() if entry.group == VERSIONS],
        r"^OK:  \[\]$",
        r"^OK:  \[\{'name': '\w+', .*'reason': \"at least one version must be available under the version policy",
    ),
    SaysMore(
        "A text goes on after Triton's words, with what to do or with the sample's name",
        [
            f"bad_{name}"
            for name in (
                "unknown_backend",
                "foreign_backend",
                "foreign_platform",
                "gpu_without_gpus",
                "warmup_variable",
                "warmup_no_data",
                "warmup_other_type",
                "warmup_other_shape",
                "warmup_missing_input",
                "members_missing",
            )
        ],
        "",
        "",
    ),
    Difference(
        "Two inputs of one name are refused; Triton serves the last one",
        ["bad_input_twice", "bad_output_twice"],
        _SERVED,
        _REFUSED + "|is specified 2 times",
    ),
    Difference(
        "A Python model without tensors is refused, because its configuration may have been cut",
        ["bad_no_tensors"],
        _SERVED,
        _REFUSED + "|must specify at least one 'input' or 'output' for bad_no_tensors",
    ),
    Difference(
        "A GPU may be named if none can be listed, as in some containers",
        ["bad_gpu_not_there"],
        "specifies invalid or unsupported gpu id 97",
        _SERVED,
    ),
    Difference(
        "The error for a GPU's number does not mention CUDA",
        ["bad_gpu_negative"],
        "specifies invalid or unsupported gpu id -1. GPUs with at least the minimum required CUDA compute",
        "specifies invalid or unsupported gpu id -1; expected the numbers of GPUs, from 0",
    ),
    Difference(
        "TensorRT's profiles are ignored with a warning",
        ["bad_profile"],
        "specifies profile field which is only supported for TensorRT models",
        _SERVED,
    ),
    Difference(
        "The error for a circle of ensembles names its members",
        ["bad_member_itself"],
        "bad_member_itself -> ... -> bad_member_itself -> bad_member_itself$",
        "bad_member_itself -> bad_member_itself$",
    ),
    Difference(
        "A sample with an unknown input is refused",
        ["bad_warmup_unknown_input"],
        _SERVED,
        "unexpected inference input 'X' for model 'bad_warmup_unknown_input'; its inputs are: IN",
    ),
    Difference(
        "A sample that is too large gives one error; Triton repeats it for each row, or crashes",
        ["bad_warmup_batch_too_big"],
        None,
        "failed to run warmup sample 'sample': batch size 9 for 'bad_warmup_batch_too_big', max allowed is 8",
    ),
    Difference(
        "Errors of a sample's file show its name unchanged",
        ["bad_warmup_size"],
        "warmup setting expects 16 bytes, but the data provided from shortonly has 4 bytes",
        r"warmup setting expects 16 bytes, but the data provided from short only has 4 bytes \(input 'IN'\)",
    ),
    Difference(
        "Ensembles have samples too, which are checked and run like a model's",
        ["bad_warmup_of_ensemble"],
        _READ,
        "expected 2 inputs but got 0 inputs for model 'bad_warmup_of_ensemble'",
    ),
    Difference(
        "A missing model file fails the load immediately; Triton stops answering",
        ["bad_no_model_file", "bad_other_model_file"],
        None,
        "unable to find the model file of 'bad_(no|other)_model_file' in version folder 1: expected (model|other).py",
    ),
    Difference(
        "Errors of a Python model name the model's file or the fault",
        ["bad_script", "bad_script_class"],
        r"Internal: (SyntaxError: invalid syntax \(model.py|AttributeError: module '1.model' has no attribute)",
        r"Invalid argument: (SyntaxError: invalid syntax \(1/model.py|.* defines no class TritonPythonModel)",
    ),
    Difference(
        "Errors for clients show no folder of the server's machine",
        ["bad_label_file_missing", "bad_warmup_no_file"],
        "failed to open text file for read /.*: No such file or directory",
        "for read bad_(label_file_missing/labels.txt|warmup_no_file/warmup/none): No such file or directory",
    ),
    Difference(
        "Load requests cannot change a Python model's parameters, which may name code",
        ["good_override_maps"],
        "^OK",
        r"^PERMISSION_DENIED: .* a load request may not set 'parameters\['k'\]'|^NOT_FOUND: Request for unknown model",
    ),
    Difference(
        "model_metrics exist in newer versions of Triton",
        ["good_metrics"],
        f"{_READ}|^NOT_FOUND: Request for unknown model: 'good_metrics' is not found$",
        "^OK",
    ),
)


_INPUT = tensor("input", "IN", "FP32", [4])
_OUTPUT = tensor("output", "OUT", "FP32", [4])
_TENSORS = _INPUT + _OUTPUT


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
    whole = step("add_sub", *MEMBER)
    more = step("add_sub", {"INPUT0": "A", "INPUT1": "mid"}, {"OUTPUT0": "SUM", "OUTPUT1": "DIFFERENCE"})
    return {
        "ensemble": ensemble(ENDS, whole),
        "ensemble_whole": ensemble(ENDS.replace("dims: [4]", "dims: [-1, 4]"), whole, max_batch_size=0),
        "ensemble_two_steps": ensemble(ENDS, step("add_sub", {"INPUT0": "A", "INPUT1": "B"}, {"OUTPUT0": "mid"}), more),
        "ensemble_any_dims": ensemble(ENDS.replace("dims: [4]", "dims: [-1]"), whole),
        "ensemble_version": ensemble(ENDS, step("add_sub", *MEMBER, version=1)),
        "ensemble_member_whole": ensemble(ENDS, step("add_sub_whole", *MEMBER)),
        "ensemble_labels_of_member": ensemble(ENDS, whole) + 'parameters { key: "k" value { string_value: "v" } }',
        "ensemble_version_policy": ensemble(ENDS, whole) + "version_policy { all { } }",
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


MEMBERS = ("add_sub", "add_sub_whole")
"""The models of the comparisons that are members of these ensembles."""
FLOATS = ParityModel(
    "floats",
    python(tensor("input", "INPUT_FP32", "FP32", [-1]) + tensor("output", "OUTPUT_FP32", "FP32", [-1])),
    "identity",
)


@pytest.fixture(scope="module")
def members(
    request: pytest.FixtureRequest, peer: TritonPeer | None, paired: Paired, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """Both servers with the members of these ensembles only, so that the index holds little else."""
    folder = tmp_path_factory.mktemp("configurations")
    models, scratch = folder / "models", folder / "scratch"
    models.mkdir()
    scratch.mkdir()
    for model in (*(model for model in parity_models() if model.name in MEMBERS), FLOATS):
        write_model(models, model)
    with (
        running_servers(peer, [models, scratch], folder, ["--load-model=*"]) as servers,
        paired(servers, CONFIGURATION_DIFFERENCES) as running,
    ):
        here = [
            item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)
        ]
        wanted = [item.callspec.params["configuration"] for item in here]
        with running.asking_ahead(*([exchange_of(configuration, scratch)] for configuration in wanted)):
            yield running


def exchange_of(configuration: Configuration, scratch: Path) -> Exchange:
    is_bad = bool(configuration.group)
    asked = [IndexRows(configuration.name)] if is_bad else described(configuration.name)
    return dropped(configuration, scratch, asked)


@pytest.mark.parametrize("configuration", bad_configurations(), ids=lambda configuration: configuration.name)
def test_bad_configurations(members: Pair, configuration: Configuration) -> None:
    members.compare(exchange_of(configuration, members.scratch), configuration.name)


@pytest.mark.parametrize("configuration", good_configurations(), ids=lambda configuration: configuration.name)
def test_good_configurations(members: Pair, configuration: Configuration) -> None:
    members.compare(exchange_of(configuration, members.scratch), configuration.name)
