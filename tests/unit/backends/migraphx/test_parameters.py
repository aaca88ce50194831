"""What a configuration asks of MIGraphX."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rocserve.backends.migraphx.options import (
    REQUEST_PARAMETERS,
    CompileOptions,
    Precision,
    ServingOptions,
    Target,
    compile_options,
    serving_options,
)
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import (
    ExecutionAccelerator,
    InputConfig,
    InstanceGroup,
    InstanceKind,
    ModelConfig,
    OutputConfig,
)

_ALL = frozenset(Target)
_HERE = frozenset({Target.REF})
ONE = InputConfig("x", DataType.FP32, (1,))


def _config(max_batch_size: int = 8, accelerator: dict[str, str] | None = None, **parameters: str) -> ModelConfig:
    accelerators = () if accelerator is None else (ExecutionAccelerator("migraphx", accelerator),)
    return ModelConfig("m", max_batch_size=max_batch_size, parameters=parameters, gpu_accelerators=accelerators)


def _compile(kind: InstanceKind = InstanceKind.AUTO, targets: frozenset[Target] = _ALL, **words: Any) -> CompileOptions:
    groups = (InstanceGroup("m_0", kind, 1),)
    return compile_options(replace(_config(**words), instance_groups=groups), kind, targets)


def _serve(**words: Any) -> ServingOptions:
    return serving_options(_config(**words))


def _refusal(error: pytest.ExceptionInfo[ServeError], code: StatusCode = StatusCode.INVALID_ARGUMENT) -> str:
    assert error.value.code is code
    return error.value.text


def test_defaults() -> None:
    assert _compile() == CompileOptions(Target.GPU)
    assert _serve() == ServingOptions((1, 2, 4, 8))
    assert _serve(max_batch_size=0).batch_sizes == ()


@pytest.mark.parametrize(
    ("kind", "targets", "target"),
    [
        (InstanceKind.AUTO, _ALL, Target.GPU),
        (InstanceKind.AUTO, _ALL - {Target.GPU}, Target.CPU),
        (InstanceKind.AUTO, _HERE, Target.REF),
        (InstanceKind.GPU, _ALL, Target.GPU),
        (InstanceKind.CPU, _ALL, Target.CPU),
        (InstanceKind.CPU, _HERE, Target.REF),
        (InstanceKind.MODEL, _HERE, Target.REF),
    ],
)
def test_a_target_by_the_kind_of_the_instance(kind: InstanceKind, targets: frozenset[Target], target: Target) -> None:
    assert _compile(kind, targets).target is target


def test_a_target_by_name() -> None:
    assert _compile(InstanceKind.CPU, target="ref").target is Target.REF
    assert _compile(InstanceKind.AUTO, target=" CPU ").target is Target.CPU


@pytest.mark.parametrize(
    ("kind", "parameters", "text"),
    [
        (InstanceKind.GPU, {"target": "ref"}, "'target' is \"ref\", but the instance is KIND_GPU; use KIND_CPU"),
        (InstanceKind.CPU, {"target": "gpu"}, "'target' is \"gpu\", but the instance is KIND_CPU; use KIND_GPU"),
        (InstanceKind.GPU, {"target": "cpu"}, "'target' is \"cpu\", but the instance is KIND_GPU; use KIND_CPU"),
        (InstanceKind.AUTO, {"target": "tpu"}, 'must be one of gpu, cpu, ref, not "tpu"'),
    ],
)
def test_targets_that_contradict(kind: InstanceKind, parameters: dict[str, str], text: str) -> None:
    with pytest.raises(ServeError) as error:
        _compile(kind, **parameters)
    assert text in _refusal(error)


@pytest.mark.parametrize(
    ("kind", "parameters", "text"),
    [
        (InstanceKind.GPU, {}, "needs MIGraphX's target gpu, because the instance is KIND_GPU"),
        (InstanceKind.AUTO, {"target": "cpu"}, "needs MIGraphX's target cpu, because 'target' is \"cpu\""),
    ],
)
def test_targets_that_are_not_here(kind: InstanceKind, parameters: dict[str, str], text: str) -> None:
    with pytest.raises(ServeError) as error:
        _compile(kind, _HERE, **parameters)
    refusal = _refusal(error, StatusCode.UNAVAILABLE)
    assert text in refusal and "(targets here: ref)" in refusal


def test_a_gpu_that_is_not_there_is_said_to_be_missing() -> None:
    """A worker of KIND_AUTO gets the CPU, which does not contradict the configuration."""
    with pytest.raises(ServeError) as error:
        compile_options(_config(target="gpu"), InstanceKind.CPU, _HERE)
    assert "needs MIGraphX's target gpu, because 'target' is \"gpu\"" in _refusal(error, StatusCode.UNAVAILABLE)


def test_compile_options() -> None:
    options = _compile(
        precision="INT8",
        calibration_data="calibration/",
        calibration_pipeline="pipelines/calibrate.json",
        calibration_samples="16",
        fast_math="0",
        exhaustive_tune="true",
        miopen_tuning="1",
    )
    assert options == CompileOptions(
        Target.GPU, Precision.INT8, "calibration", "pipelines/calibrate.json", 16, False, True, True
    )
    assert _compile(precision="fp8", calibration_data="x.npz").calibration_samples == 128


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"precision": "fp4"}, 'must be one of fp32, fp16, bf16, fp8, int8, not "fp4"'),
        ({"precision": "int8"}, "precision \"int8\" needs 'calibration_data'"),
        ({"precision": "fp8"}, "precision \"fp8\" needs 'calibration_data'"),
        ({"calibration_data": "x.npz"}, "'calibration_data' has no effect with precision \"fp32\""),
        ({"precision": "fp16", "calibration_data": "x"}, "'calibration_data' has no effect with precision \"fp16\""),
        ({"calibration_samples": "3"}, "'calibration_samples' has no effect"),
        ({"precision": "int8", "calibration_data": "/etc"}, "must be a path within the model's folder"),
        ({"precision": "int8", "calibration_data": "a/../../b"}, "must be a path within the model's folder"),
        ({"precision": "int8", "calibration_data": "x", "calibration_pipeline": "../p"}, "'calibration_pipeline'"),
        ({"precision": "int8", "calibration_data": "x", "calibration_samples": "0"}, 'from 1 to 10000, not "0"'),
        ({"fast_math": "yes"}, 'must be true, false, 1 or 0, not "yes"'),
        ({"exhaustive_tune": "2"}, "parameter 'exhaustive_tune' of model 'm' must be true, false, 1 or 0"),
    ],
)
def test_compile_options_that_are_refused(parameters: dict[str, str], text: str) -> None:
    with pytest.raises(ServeError) as error:
        _compile(**parameters)
    assert text in _refusal(error)


def test_serving_options() -> None:
    options = _serve(
        batch_sizes="1, 4",
        pad_batch="false",
        input_shapes="a: 3x4; b:0: 5",
        compile_timeout_secs="12.5",
        binding="c_api",
    )
    assert options == ServingOptions((1, 4), False, {"a": (3, 4), "b:0": (5,)}, 12.5, "c_api", True)
    assert _serve(batch="8").batch_sizes == (8,)
    assert _serve(batch_sizes="1,16", max_batch_size=0).batch_sizes == (1, 16), "max_batch_size is still open"
    written = replace(_config(0, batch_sizes="1"), inputs=(ONE,), outputs=(OutputConfig("y", DataType.FP32, (1,)),))
    with pytest.raises(ServeError, match="but max_batch_size is 0, so the model has no batch dimension"):
        serving_options(written)
    assert _serve(max_batch_size=6).batch_sizes == (1, 2, 4, 6)
    assert _serve(compile_timeout_secs="0").compile_timeout_seconds == 0


def test_input_shapes_as_json() -> None:
    assert _serve(input_shapes='{"a": [3, 4], "b": []}').input_shapes == {"a": (3, 4), "b": ()}


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"batch_sizes": "1,16"}, "parameter 'batch_sizes' of model 'm' must be"),
        ({"batch": "9"}, "whole numbers from 1 to max_batch_size, which is 8"),
        ({"dynamic_batch": "1"}, "'dynamic_batch' is not supported; remove it"),
        ({"dynamic_batch": "false", "batch": "1"}, "MIGraphX compiles a program for each of 'batch_sizes'"),
        ({"batch": "x", "max_batch_size": 0}, "must be a whole number from 1 to"),
        ({"batch_sizes": "1,x", "max_batch_size": 0}, 'whole numbers from 1 on, as in "1, 8", not "1,x"'),
        ({"pad_batch": "maybe"}, "must be true, false, 1 or 0"),
        ({"compile_timeout_secs": "-1"}, "must be seconds from 0 (no limit)"),
        ({"compile_timeout_secs": "nan"}, "must be seconds from 0 (no limit)"),
        ({"compile_timeout_secs": "soon"}, 'not "soon"'),
        ({"binding": "rust"}, "must be one of auto, c_api, module"),
        ({"input_shapes": "3x4"}, "'3x4' has no name"),
        ({"input_shapes": "a: 3xb"}, "'3xb' are not dimensions"),
        ({"input_shapes": "a: 3; a: 4"}, "'a' occurs twice"),
        ({"input_shapes": "a: 0x4"}, "the dimensions of 'a' must be 1 or more"),
        ({"input_shapes": "a: 999999999x999999999"}, "that memory can hold"),
        ({"input_shapes": '{"a": 3}'}, "'a' must have a list of whole numbers"),
        ({"input_shapes": '{"a": [true]}'}, "'a' must have a list of whole numbers"),
        ({"input_shapes": '{"a": [-1]}'}, "the dimensions of 'a' must be 1 or more"),
        ({"input_shapes": "{" * 9999}, "the JSON cannot be read"),
    ],
)
def test_serving_options_that_are_refused(parameters: dict[str, Any], text: str) -> None:
    with pytest.raises(ServeError) as error:
        _serve(**parameters)
    assert text in _refusal(error)


class TestAccelerator:
    def test_our_names(self) -> None:
        words = {"precision": "bf16", "fast_math": "false"}
        assert _compile(accelerator=words) == _compile(**words)

    def test_parameters_win(self) -> None:
        assert _compile(accelerator={"precision": "bf16"}, precision="fp16").precision is Precision.FP16
        assert _serve(accelerator={"batch_sizes": "4"}, batch_sizes="8").batch_sizes == (8,)
        assert _serve(accelerator={"batch_sizes": "4"}, batch="8") == ServingOptions((8,), has_named_sizes=True)

    @pytest.mark.parametrize(
        ("words", "text"),
        [
            ({"fp16": "1"}, "'fp16', which is unknown to the engine \"migraphx\"; known are batch, batch_sizes,"),
            ({"target": "gpu"}, "'target', which is unknown"),
            ({"dynamic_batch": "1"}, "'dynamic_batch', which is unknown"),
            ({"device_id": "0"}, "'device_id', which is unknown"),
            ({"migraphx_fp16_enable": "0"}, "MIGraphX provider need parameter 'engine' \"onnxruntime\""),
            ({"migraphx_max_dynamic_batch": "64"}, "MIGraphX provider need parameter 'engine' \"onnxruntime\""),
            ({"precision": "int8"}, "precision \"int8\" needs 'calibration_data'"),
        ],
    )
    def test_what_is_refused(self, words: dict[str, str], text: str) -> None:
        with pytest.raises(ServeError) as error:
            _compile(accelerator=words)
        assert text in _refusal(error)

    def test_two_that_contradict_each_other(self) -> None:
        both = [ExecutionAccelerator("migraphx", {"precision": one}) for one in ("fp16", "bf16")]
        with pytest.raises(ServeError) as error:
            compile_options(ModelConfig("m", gpu_accelerators=(*both,)), InstanceKind.AUTO, _ALL)
        assert 'which is "bf16", and "fp16" in another accelerator of this name; keep one' in _refusal(error)

    def test_those_of_other_engines_are_not_read(self) -> None:
        config = ModelConfig("m", gpu_accelerators=(ExecutionAccelerator("tensorrt", {"precision_mode": "FP8"}),))
        assert compile_options(config, InstanceKind.AUTO, _ALL).precision is Precision.FP32


def test_every_parameter_has_a_row() -> None:
    text = (Path(__file__).parents[4] / "docs/reference/migraphx.md").read_text()
    table = text.partition("## All parameters\n")[2].partition("\nNames of other servers:\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == {"load_check", *REQUEST_PARAMETERS}
