"""The execution providers of ONNX Runtime that a model gets, and their options. No session is opened here."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from support.models import add_sub

from rocserve.backends.base import ModelSource
from rocserve.backends.migraphx.options import serving_options
from rocserve.backends.onnx.provider_options import CUDA, OPENVINO, ROCM, compiled_batch_sizes, pads_with_first_row
from rocserve.backends.onnx.providers import KINDS, MIGRAPHX_PROVIDER, ProviderPlan, plan_providers
from rocserve.backends.parameters import usable_cpus
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import ExecutionAccelerator, InstanceKind, ModelConfig

SourceMaker = Callable[..., ModelSource]

CPU = ("CPUExecutionProvider",)
ALL = (*(kind.provider for kind in KINDS), *CPU)


@pytest.fixture
def plan_for(model_source: SourceMaker) -> Callable[..., ProviderPlan]:
    def plan(
        available: Sequence[str] = ALL,
        *,
        kind: InstanceKind = InstanceKind.CPU,
        device: int | None = None,
        gpu: Sequence[ExecutionAccelerator] = (),
        cpu: Sequence[ExecutionAccelerator] = (),
        **parameters: str,
    ) -> ProviderPlan:
        source = model_source("model.onnx", add_sub(), kind=kind, parameters=parameters)
        config = replace(source.config, gpu_accelerators=tuple(gpu), cpu_accelerators=tuple(cpu))
        return plan_providers(replace(source, config=config, device=device), available)

    return plan


PlanMaker = Callable[..., ProviderPlan]


def kinds(plan: ProviderPlan) -> list[str]:
    return [provider.kind.accelerator for provider in plan.providers]


@pytest.mark.parametrize(
    ("available", "kind", "expected"),
    [
        (CPU, InstanceKind.CPU, []),
        (("AzureExecutionProvider", *CPU), InstanceKind.CPU, []),
        ((OPENVINO.provider, *CPU), InstanceKind.CPU, ["openvino"]),
        ((CUDA.provider, *CPU), InstanceKind.CPU, []),
        (ALL, InstanceKind.GPU, ["migraphx"]),
        ((CUDA.provider, ROCM.provider, *CPU), InstanceKind.GPU, ["rocm"]),
        (("TensorrtExecutionProvider", CUDA.provider, *CPU), InstanceKind.GPU, ["cuda"]),
    ],
)
def test_the_best_that_is_offered(
    plan_for: PlanMaker, available: Sequence[str], kind: InstanceKind, expected: list[str]
) -> None:
    plan = plan_for(available, kind=kind)
    assert kinds(plan) == expected
    assert not plan.accepts_cpu
    assert plan.on_gpu is (kind is InstanceKind.GPU)


def test_parameters_of_a_provider_that_is_not_used_are_not_read(plan_for: PlanMaker) -> None:
    assert kinds(plan_for(ALL, kind=InstanceKind.GPU, cudnn_conv_algo_search="no such")) == ["migraphx"]
    with pytest.raises(ServeError, match="'cudnn_conv_algo_search', which must be one of"):
        plan_for((CUDA.provider, *CPU), kind=InstanceKind.GPU, cudnn_conv_algo_search="no such")
    with pytest.raises(ServeError, match="the installed ONNX Runtime has no MIGraphXExecutionProvider or"):
        plan_for(CPU, kind=InstanceKind.GPU, cudnn_conv_algo_search="no such")


def test_the_engine_cpu_is_the_cpu_provider_alone(plan_for: PlanMaker) -> None:
    assert kinds(plan_for(ALL, engine="cpu")) == []
    assert kinds(plan_for(ALL, engine="onnxruntime")) == ["openvino"]
    with pytest.raises(ServeError, match="asks for KIND_GPU, but its parameter 'engine' is \"cpu\""):
        plan_for(ALL, engine="cpu", kind=InstanceKind.GPU)


def test_a_gpu_is_not_replaced_in_silence(plan_for: PlanMaker, caplog: pytest.LogCaptureFixture) -> None:
    text = (
        "model 'model': the installed ONNX Runtime has no MIGraphXExecutionProvider or ROCMExecutionProvider or"
        " CUDAExecutionProvider, only CPUExecutionProvider; the Python package onnxruntime-migraphx or onnxruntime-rocm"
        " or onnxruntime-gpu has it; install that package, use KIND_CPU without the accelerator, or set parameter"
        " 'engine' to \"auto\" to accept the CPU"
    )
    for engine in ({}, {"engine": "onnxruntime"}):
        with pytest.raises(ServeError) as caught:
            plan_for(CPU, kind=InstanceKind.GPU, **engine)
        assert (caught.value.code, caught.value.text) == (StatusCode.UNAVAILABLE, text)
    plan = plan_for(CPU, kind=InstanceKind.GPU, engine="auto")
    assert (kinds(plan), plan.accepts_cpu) == ([], True)
    assert "model 'model' runs on the CPU, as parameter 'engine' is \"auto\": the installed" in caplog.text


def test_an_accelerator_that_is_not_there(plan_for: PlanMaker, caplog: pytest.LogCaptureFixture) -> None:
    openvino = ExecutionAccelerator("openvino")
    with pytest.raises(ServeError, match="has no OpenVINOExecutionProvider, only CPUExecutionProvider") as caught:
        plan_for(CPU, cpu=[openvino])
    assert caught.value.code is StatusCode.UNAVAILABLE
    assert kinds(plan_for(CPU, cpu=[openvino], engine="auto")) == []
    assert "continuing without it, as parameter 'engine' is \"auto\"" in caplog.text
    with pytest.raises(ServeError, match="has no MIGraphXExecutionProvider, only CUDAExecutionProvider"):
        plan_for((CUDA.provider, *CPU), gpu=[ExecutionAccelerator("migraphx")], kind=InstanceKind.GPU)


def test_accelerators_of_gpus_are_passed_over_on_the_cpu(plan_for: PlanMaker, caplog: pytest.LogCaptureFixture) -> None:
    migraphx = ExecutionAccelerator("migraphx", {"migraphx_max_dynamic_batch": "64"})
    assert kinds(plan_for(CPU, gpu=[migraphx])) == []
    assert "'migraphx' is not used: the instance is on the CPU" in caplog.text
    assert kinds(plan_for(ALL, gpu=[migraphx], cpu=[ExecutionAccelerator("openvino")])) == ["openvino"]


@pytest.mark.parametrize(
    ("lists", "text"),
    [
        ({"gpu": [ExecutionAccelerator("tensorrt")]}, "'tensorrt' .NVIDIA. is not supported; use migraphx, rocm, c"),
        ({"gpu": [ExecutionAccelerator("tpu")]}, "'tpu' is unknown; known are migraphx, rocm, cuda, openvino"),
        ({"cpu": [ExecutionAccelerator("cuda")]}, "'cuda' is an accelerator for GPUs; name it in gpu_execution_accel"),
        (
            {"cpu": [ExecutionAccelerator("openvino", {"presicion": "FP16"})]},
            "'openvino' has parameter 'presicion', which is unknown; known are cache_dir, device_type,.*precision",
        ),
        (
            {"cpu": [ExecutionAccelerator("openvino", {"num_of_threads": "many"})]},
            "'num_of_threads', which must be a whole number, not \"many\"",
        ),
        (
            {"cpu": [ExecutionAccelerator("openvino", {"device_id": "0"})]},
            "'device_id', which cannot be followed: name the device in 'device_type'",
        ),
        (
            {"gpu": [ExecutionAccelerator("cuda", {"cudnn_conv_algo_search": "3"})]},
            'which must be one of 0, 1, 2, EXHAUSTIVE, HEURISTIC, DEFAULT, not "3"',
        ),
        (
            {"gpu": [ExecutionAccelerator("migraphx", {"device_id": "1"})]},
            "'device_id', which cannot be followed: name the GPUs in the instance group's 'gpus'",
        ),
        (
            {"gpu": [ExecutionAccelerator("migraphx", {"migraphx_int8_enable": "1"})]},
            "'migraphx_int8_enable', which needs 'migraphx_int8_calibration_table_name': without calibration",
        ),
        (
            {"gpu": [ExecutionAccelerator("migraphx", {"precision": "int8"})]},
            "which needs 'migraphx_int8_calibration_table_name'",
        ),
        (
            {"gpu": [ExecutionAccelerator("migraphx", {"precision": "fp16", "precision_mode": "bf16"})]},
            "'precision' and 'precision_mode' differ",
        ),
        (
            {"gpu": [ExecutionAccelerator("migraphx", {"precision": "FP32", "migraphx_fp16_enable": "true"})]},
            "precision \"FP32\" contradicts 'migraphx_fp16_enable'",
        ),
        (
            {"gpu": [ExecutionAccelerator("migraphx", {"migraphx_int8_calibration_table_name": "/etc/passwd"})]},
            "calibration table '/etc/passwd' must be a path within its folder",
        ),
        (
            {"gpu": [ExecutionAccelerator("migraphx", {"migraphx_int8_calibration_table_name": "none.flatbuffers"})]},
            "calibration table .*/none.flatbuffers does not exist or is not a file",
        ),
    ],
)
@pytest.mark.parametrize("kind", [InstanceKind.CPU, InstanceKind.GPU])
def test_accelerators_that_cannot_be(
    plan_for: PlanMaker, lists: dict[str, Sequence[ExecutionAccelerator]], text: str, kind: InstanceKind
) -> None:
    with pytest.raises(ServeError, match=text) as caught:
        plan_for(ALL, kind=kind, **lists)
    assert caught.value.code is StatusCode.INVALID_ARGUMENT


def test_parameters_of_the_migraphx_provider(plan_for: PlanMaker, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    migraphx = ExecutionAccelerator(
        "migraphx",
        {
            "precision_mode": "FP16",
            "migraphx_exhaustive_tune": "true",
            "migraphx_mem_limit": "4294967296",
            "migraphx_arena_extend_strategy": "1",
            "migraphx_max_dynamic_batch": "8",
            "migraphx_model_cache_dir": "/somewhere",
            "migraphx_hip_graph_enable": "true",
            "ORT_MIGRAPHX_COALESCE_IO": "0",
            "binding": "c_api",
        },
    )
    (provider,) = plan_for(ALL, kind=InstanceKind.GPU, device=3, gpu=[migraphx]).providers
    assert provider.options == {
        "migraphx_fp16_enable": "1",
        "migraphx_exhaustive_tune": "1",
        "migraphx_mem_limit": "4294967296",
        "migraphx_arena_extend_strategy": "kSameAsRequested",
        "device_id": "0",
    }
    assert ProviderPlan((provider,), False).compiling
    assert provider.caches_programs
    # Older providers refuse options that they do not know, and ignore variables.
    assert provider.variables == {"ORT_MIGRAPHX_HIP_GRAPH_ENABLE": "1", "ORT_MIGRAPHX_COALESCE_IO": "0"}
    assert provider.accelerator["migraphx_max_dynamic_batch"] == "8"
    assert "parameter 'migraphx_model_cache_dir' has no effect: compiled programs are kept" in caplog.text


def test_a_calibration_table_of_the_model(model_source: SourceMaker, plan_for: PlanMaker) -> None:
    table = model_source("model.onnx", add_sub()).model_folder / "table.flatbuffers"
    table.write_bytes(b"table")
    name = "migraphx_int8_calibration_table_name"
    migraphx = ExecutionAccelerator("migraphx", {"precision": "int8", name: "table.flatbuffers"})
    (provider,) = plan_for(ALL, kind=InstanceKind.GPU, gpu=[migraphx]).providers
    assert provider.options == {"migraphx_int8_enable": "1", name: str(table), "device_id": "0"}


def test_parameters_of_the_cuda_provider(plan_for: PlanMaker) -> None:
    cuda = ExecutionAccelerator("cuda", {"use_tf32": "false", "gpu_mem_limit": "100"})
    parameters = {"cudnn_conv_algo_search": "2", "gpu_mem_limit": "7"}
    (provider,) = plan_for(ALL, kind=InstanceKind.GPU, device=2, gpu=[cuda], **parameters).providers
    assert provider.options == {
        "use_tf32": "0",
        "gpu_mem_limit": "100",
        "cudnn_conv_algo_search": "DEFAULT",
        "device_id": "2",
    }
    assert not ProviderPlan((provider,), False).compiling


def test_parameters_of_the_openvino_provider(plan_for: PlanMaker) -> None:
    (usual,) = plan_for(ALL).providers
    assert usual.options == {"num_of_threads": str(usable_cpus())}
    assert not ProviderPlan((usual,), False).compiling
    assert not usual.caches_programs
    parameters = {"device_type": "GPU.1", "precision": "fp16", "num_of_threads": "3", "cache_dir": "anything"}
    (chosen,) = plan_for(ALL, cpu=[ExecutionAccelerator("OpenVINO", parameters)]).providers
    assert chosen.options == {"device_type": "GPU.1", "precision": "FP16", "num_of_threads": "3"}
    assert ProviderPlan((chosen,), False).compiling
    assert chosen.caches_programs
    (static,) = plan_for(ALL, cpu=[ExecutionAccelerator("openvino", {"disable_dynamic_shapes": "1"})]).providers
    assert ProviderPlan((static,), False).compiling


@pytest.mark.parametrize(
    ("parameters", "accelerator", "largest", "sizes"),
    [
        ({}, {}, 6, (1, 2, 4, 6)),
        ({}, {}, 0, ()),
        ({}, {"migraphx_max_dynamic_batch": "4"}, 16, (1, 2, 4)),
        ({}, {"migraphx_max_dynamic_batch": "64"}, 8, (1, 2, 4, 8)),
        ({}, {"migraphx_max_dynamic_batch": "0"}, 2, (1, 2)),
        ({}, {"migraphx_compile_batches": "1,8"}, 8, (1, 8)),
        ({}, {"batch": "4"}, 0, ()),
        ({"batch_sizes": "3"}, {"migraphx_compile_batches": "1,8"}, 8, (3,)),
        ({"batch": "8"}, {}, 8, (8,)),
    ],
)
def test_batch_sizes_of_a_provider_that_compiles_each(
    parameters: dict[str, str], accelerator: dict[str, str], largest: int, sizes: tuple[int, ...]
) -> None:
    config = ModelConfig("m", max_batch_size=largest, parameters=parameters)
    assert compiled_batch_sizes(config, accelerator, largest) == sizes


def test_batch_sizes_above_the_largest() -> None:
    with pytest.raises(ServeError, match=r"parameter 'batch_sizes' of model 'm' must be .* which is 4"):
        compiled_batch_sizes(ModelConfig("m", parameters={"batch_sizes": "1, 8"}), {}, 4)
    with pytest.raises(ServeError, match=r"the execution accelerator's 'batch' of model 'm' must be .* which is 4"):
        compiled_batch_sizes(ModelConfig("m"), {"batch": "8"}, 4)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"batch": "1, 2"}, "'batch' of model 'm' must be a whole number from 1 to 2147483647, not \"1, 2\""),
        ({"batch": "0"}, "'batch' of model 'm' must be a whole number from 1 to 2147483647, not \"0\""),
        (
            {"batch": "2", "batch_sizes": "1, 2"},
            "model 'm': 'batch' is the one batch size, 'batch_sizes' a list of them; remove one of them",
        ),
    ],
)
def test_batch_sizes_are_refused_in_the_words_of_migraphx(values: dict[str, str], text: str) -> None:
    config = ModelConfig("m", max_batch_size=4, parameters=values)
    accelerated = ModelConfig("m", max_batch_size=4, gpu_accelerators=(ExecutionAccelerator("migraphx", values),))
    refusals = []
    for refuse in (
        lambda: serving_options(config),
        lambda: compiled_batch_sizes(config, {}, 4),
        lambda: serving_options(accelerated),
        lambda: compiled_batch_sizes(ModelConfig("m", max_batch_size=4), values, 4),
    ):
        with pytest.raises(ServeError, match=re.escape(text)) as caught:
            refuse()
        refusals.append((caught.value.code, caught.value.text))
    assert refusals[0] == refusals[1]


def test_how_batches_are_padded() -> None:
    assert pads_with_first_row(ModelConfig("m"), {})
    assert not pads_with_first_row(ModelConfig("m"), {"pad_batch": "0"})
    assert not pads_with_first_row(ModelConfig("m", parameters={"pad_batch": "false"}), {"pad_batch": "1"})
    with pytest.raises(ServeError, match="parameter 'pad_batch' of model 'm' must be true, false, 1 or 0, not \"No\""):
        pads_with_first_row(ModelConfig("m", parameters={"pad_batch": "No"}), {})


def test_all_kinds_of_providers_differ_in_each_attribute() -> None:
    for attribute in ("accelerator", "provider", "package"):
        assert len({getattr(kind, attribute) for kind in KINDS}) == len(KINDS)
    assert KINDS[0] is MIGRAPHX_PROVIDER
