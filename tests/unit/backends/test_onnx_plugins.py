"""Execution providers that are plugins of ONNX Runtime: how they are found, and the devices and options they get."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest
from support.models import add_sub
from support.provider_plugins import provider_packages, run_python, stub_of_amds_plugin

from rocserve.backends.base import ModelSource
from rocserve.backends.onnx.external_weights import NO_WEIGHTS
from rocserve.backends.onnx.plugins import Plugin, gpu_devices, openvino_devices
from rocserve.backends.onnx.provider_options import CUDA, MIGRAPHX_PROVIDER, OPENVINO, ProviderKind, plugin_options
from rocserve.backends.onnx.providers import ProviderPlan, plan_providers, with_caches
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import ExecutionAccelerator, InstanceKind

SourceMaker = Callable[..., ModelSource]
CPU = ("CPUExecutionProvider",)
Kind = onnxruntime.OrtHardwareDeviceType


def device(name: str, kind: Any, openvino: str = "") -> Any:
    """What ONNX Runtime gives for a device."""
    metadata = {"ov_device": openvino} if openvino else {}
    return SimpleNamespace(ep_name=name, device=SimpleNamespace(type=kind, vendor="some"), ep_metadata=metadata)


@dataclass(frozen=True, slots=True)
class ToldPlugin(Plugin):
    """A plugin with these devices; without any, it cannot be registered."""

    found: tuple[Any, ...] = ()

    def devices(self, migraphx: str) -> tuple[Any, ...]:
        if not self.found:
            raise RuntimeError("ONNX Runtime cannot register it: no driver")
        return self.found


def told(kind: ProviderKind, *found: Any) -> dict[str, Plugin]:
    return {kind.provider: ToldPlugin("onnxruntime_ep_some", kind.provider, "", found)}


AMD_GPU, OTHER_AMD_GPU = (device(MIGRAPHX_PROVIDER.provider, Kind.GPU) for _ in range(2))
INTEL = tuple(
    device(OPENVINO.provider, kind, name)
    for kind, name in ((Kind.CPU, "CPU"), (Kind.GPU, "GPU.0"), (Kind.GPU, "GPU.1"), (Kind.NPU, "NPU"))
)
AUTO = tuple(device(f"{OPENVINO.provider}.AUTO", one.device.type, one.ep_metadata["ov_device"]) for one in INTEL)


@pytest.fixture
def source(model_source: SourceMaker) -> Callable[..., ModelSource]:
    def make(accelerator: ExecutionAccelerator | None = None, on_gpu: bool = True, **parameters: str) -> ModelSource:
        kind = InstanceKind.GPU if on_gpu else InstanceKind.CPU
        made = model_source("model.onnx", add_sub(), kind=kind, parameters=parameters)
        field = "gpu_accelerators" if on_gpu else "cpu_accelerators"
        return replace(made, config=replace(made.config, **{field: (accelerator,) if accelerator else ()}))

    return make


def test_amds_plugin_is_taken_for_migraphx(source: Callable[..., ModelSource]) -> None:
    plugins = told(MIGRAPHX_PROVIDER, AMD_GPU, OTHER_AMD_GPU)
    for accelerator in (None, ExecutionAccelerator("migraphx", {"migraphx_fp16_enable": "1"})):
        for available in (CPU, (MIGRAPHX_PROVIDER.provider, *CPU)):
            (provider,) = plan_providers(source(accelerator), available, plugins).providers
            assert provider.kind is MIGRAPHX_PROVIDER
            assert [*provider.devices] == [AMD_GPU], "HIP_VISIBLE_DEVICES leaves the worker only its own"
    assert ProviderPlan((provider,), False).compiling is provider
    assert not plan_providers(source(on_gpu=False), CPU, plugins).providers


def test_the_gpu_of_the_instance() -> None:
    assert gpu_devices([INTEL[0], AMD_GPU, OTHER_AMD_GPU], 1) == [OTHER_AMD_GPU]
    assert not gpu_devices([INTEL[0], AMD_GPU], 1)


def test_a_plugin_without_its_devices_is_an_error_and_not_the_cpu(
    source: Callable[..., ModelSource], caplog: pytest.LogCaptureFixture
) -> None:
    accelerator, cpu = ExecutionAccelerator("openvino", {"device_type": "NPU"}), told(OPENVINO, *INTEL[:1])
    for model, plugins, text in (
        (
            source(),
            told(MIGRAPHX_PROVIDER),
            "onnxruntime-ep-some is installed, but ONNX Runtime cannot register it: no",
        ),
        (source(), told(MIGRAPHX_PROVIDER, INTEL[0]), "its MIGraphXExecutionProvider finds no device that"),
        (source(accelerator, False), cpu, "its OpenVINOExecutionProvider finds no device 'NPU' that it can use"),
    ):
        with pytest.raises(ServeError, match=text) as caught:
            plan_providers(model, CPU, plugins)
        assert caught.value.code is StatusCode.UNAVAILABLE
        assert "; use KIND_CPU without the accelerator, or set parameter 'engine' to \"auto\"" in caught.value.text
    plan = plan_providers(source(accelerator, False, engine="auto"), CPU, cpu)
    assert (plan.providers, plan.accepts_cpu) == ((), True)
    assert "finds no device 'NPU'" in caplog.text


def test_a_plugin_that_nobody_names_need_not_have_devices(source: Callable[..., ModelSource]) -> None:
    assert not plan_providers(source(on_gpu=False), CPU, told(OPENVINO)).providers
    (provider,) = plan_providers(source(on_gpu=False), CPU, told(OPENVINO, *INTEL)).providers
    assert [*provider.devices] == [INTEL[0]]
    assert not plan_providers(source(on_gpu=False, engine="cpu"), CPU, told(OPENVINO, *INTEL)).providers


def test_a_plugin_beside_a_provider_of_onnx_runtime(source: Callable[..., ModelSource]) -> None:
    model = source()
    both = (ExecutionAccelerator("migraphx"), ExecutionAccelerator("cuda"))
    model = replace(model, config=replace(model.config, gpu_accelerators=both))
    with pytest.raises(ServeError, match="cannot be combined with a provider that is part of it"):
        plan_providers(model, (CUDA.provider, *CPU), told(MIGRAPHX_PROVIDER, AMD_GPU))


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("CPU", INTEL[:1]),
        ("gpu", INTEL[1:2]),
        ("GPU.1", INTEL[2:3]),
        ("GPU.2", ()),
        ("AUTO", AUTO),
        ("AUTO:GPU.1,CPU", (AUTO[2], AUTO[0])),
        ("AUTO:GPU.7,CPU", ()),
        ("HETERO:GPU,CPU", ()),
    ],
)
def test_devices_by_openvinos_names(wanted: str, found: tuple[Any, ...]) -> None:
    assert [*openvino_devices([*INTEL, *AUTO], wanted)] == [*found]


def test_amds_plugin_has_shorter_names() -> None:
    options = {
        "migraphx_fp16_enable": "1",
        "migraphx_use_native_calibration_table": "1",
        "migraphx_exhaustive_tune": "0",
        "migraphx_mem_limit": "100",
        "device_id": "0",
    }
    assert plugin_options(MIGRAPHX_PROVIDER, options) == {
        "fp16_enable": "1",
        "int8_use_native_calibration_table": "1",
        "exhaustive_tune": "0",
        "device_id": "0",
    }
    assert plugin_options(CUDA, {"use_tf32": "0"}) == {"use_tf32": "0"}


@pytest.mark.parametrize(
    ("options", "properties"),
    [
        ({"num_of_threads": "3"}, {"CPU": {"INFERENCE_NUM_THREADS": "3"}}),
        ({"precision": "FP32"}, {"CPU": {"INFERENCE_PRECISION_HINT": "f32"}}),
        ({"precision": "ACCURACY", "cache_dir": "/c"}, {"CPU": {"EXECUTION_MODE_HINT": "ACCURACY", "CACHE_DIR": "/c"}}),
        (
            {"device_type": "GPU.1", "num_of_threads": "3", "model_priority": "DEFAULT"},
            {"GPU": {"MODEL_PRIORITY": "MEDIUM"}},
        ),
        (
            {"device_type": "NPU", "disable_dynamic_shapes": "true", "precision": "FP16"},
            {"NPU": {"INFERENCE_PRECISION_HINT": "f16"}},
        ),
        (
            {"device_type": "AUTO:NPU,CPU", "enable_qdq_optimizer": "true", "num_streams": "2"},
            {"NPU": {"NPU_QDQ_OPTIMIZATION": "YES"}, "CPU": {"NUM_STREAMS": "2"}},
        ),
    ],
)
def test_openvinos_plugin_takes_properties_of_each_device(options: dict[str, str], properties: dict[str, Any]) -> None:
    (name,) = given = plugin_options(OPENVINO, options)
    assert name == "load_config"
    assert json.loads(given[name]) == properties


def test_the_plugins_programs_are_in_the_cache(
    source: Callable[..., ModelSource], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORT_MIGRAPHX_CACHE_DIR", "")
    monkeypatch.delenv("ORT_MIGRAPHX_MODEL_CACHE_PATH", raising=False)
    model = source()
    model = replace(model, settings=replace(model.settings, cache_directory=str(tmp_path / "cache")))
    plan = plan_providers(model, CPU, told(MIGRAPHX_PROVIDER, AMD_GPU))
    assert with_caches(model, plan, NO_WEIGHTS).providers == plan.providers
    (folder,) = (tmp_path / "cache" / "onnxruntime").iterdir()
    assert os.environ["ORT_MIGRAPHX_CACHE_DIR"] == str(folder)
    assert "ORT_MIGRAPHX_MODEL_CACHE_PATH" not in os.environ


_LOAD = """
import json, sys
from dataclasses import replace
from pathlib import Path
import numpy as np
from rocserve.backends.base import Batch, ModelSource, model_properties
from rocserve.backends.onnx.backend import load
from rocserve.core.errors import ServeError
from rocserve.core.model_config import ExecutionAccelerator, InstanceKind, ModelConfig
from rocserve.core.tensors import tensor_from_numpy

file, on_gpu = Path({file!r}), {on_gpu!r}
{before}
accelerators = tuple(ExecutionAccelerator(*one) for one in {accelerators!r})
config = ModelConfig("m", parameters={parameters!r})
config = replace(config, **{{"gpu_accelerators" if on_gpu else "cpu_accelerators": accelerators}})
kind = InstanceKind.GPU if on_gpu else InstanceKind.CPU
try:
    model = load(ModelSource("m", 1, file.parent, file.parent, file, config, kind, 0 if on_gpu else None, 1))
    numbers = np.arange(16, dtype=np.int32).reshape(1, 16)
    inputs = {{name: tensor_from_numpy(name, numbers) for name in ("INPUT0", "INPUT1")}}
    outputs = model.execute(Batch(inputs, ("OUTPUT0",), (1,))).outputs
    print(model_properties(model)["execution_providers"], np.asarray(outputs["OUTPUT0"]).tolist())
except ServeError as error:
    print(error.code.name, error.text)
"""
MISSING = "libmigraphx_c.so.3: cannot open shared object file: No such file or directory; install MIGraphX: apt-get "
DOUBLED = [[2 * number for number in range(16)]]


def loaded(model: ModelSource, *path: Path, on_gpu: bool = True, before: str = "", **variables: str) -> str:
    """What a process with these packages says of the model: its providers and an answer, or the error."""
    config = model.config
    chosen = config.gpu_accelerators if on_gpu else config.cpu_accelerators
    accelerators = [(one.name, dict(one.parameters)) for one in chosen]
    script = _LOAD.format(
        file=str(model.model_file),
        on_gpu=on_gpu,
        before=before,
        accelerators=accelerators,
        parameters=dict(config.parameters),
    )
    return run_python(script, *path, **variables)


@pytest.mark.long
def test_a_plugin_is_registered_with_the_libraries_that_it_needs(
    source: Callable[..., ModelSource], tmp_path: Path
) -> None:
    packages, root = stub_of_amds_plugin(tmp_path)
    text = loaded(source(), packages, ROCSERVE_MIGRAPHX_ROOT=str(root))
    assert text.startswith("UNAVAILABLE model 'm': onnxruntime-ep-migraphx is installed, but its MIGraphXExecutionProv")
    assert "finds no device that it can use (ONNX Runtime sees: CPU of " in text
    missing = loaded(source(), packages, ROCSERVE_MIGRAPHX_ROOT=str(tmp_path))
    assert "ONNX Runtime cannot register it: " in missing
    assert MISSING in missing
    accepted = loaded(source(engine="auto"), packages, ROCSERVE_MIGRAPHX_ROOT=str(root))
    assert accepted.strip() == f"CPUExecutionProvider {DOUBLED}"


@pytest.mark.long
def test_openvinos_plugin(source: Callable[..., ModelSource]) -> None:
    packages = provider_packages("openvino")
    named = ExecutionAccelerator("openvino", {"num_streams": "1", "precision": "FP32"})
    text = loaded(source(named, False), packages, on_gpu=False)
    if text.startswith("UNAVAILABLE"):
        # It uses Intel's processors only.
        assert (
            "onnxruntime-ep-openvino 1.8.1 is installed, but its OpenVINOExecutionProvider finds no device 'CPU'"
            in text
        )
        provider = "CPUExecutionProvider"
    else:
        provider = "OpenVINOExecutionProvider, CPUExecutionProvider"
        assert text.strip() == f"{provider} {DOUBLED}"
    assert loaded(source(on_gpu=False), packages, on_gpu=False).strip() == f"{provider} {DOUBLED}"


@pytest.mark.long
def test_a_plugin_gets_its_device_and_its_own_options(source: Callable[..., ModelSource]) -> None:
    """On a device that OpenVINO can only compile for, with a compiler that the package lacks."""
    packages = provider_packages("openvino")
    register = (
        "import onnxruntime, onnxruntime_ep_openvino as plugin\n"
        "onnxruntime.register_execution_provider_library('of_this_test.virtual', plugin.get_library_path())"
    )
    npu = ExecutionAccelerator("openvino", {"device_type": "NPU", "precision": "FP16", "enable_qdq_optimizer": "1"})
    text = loaded(source(npu, False), packages, on_gpu=False, before=register)
    if "finds no device" in text:
        pytest.skip("this OpenVINO offers no virtual devices")
    assert text.startswith("UNAVAILABLE ONNX Runtime cannot run model.onnx on OpenVINOExecutionProvider: ")
    assert "compiler" in text and "JSON" not in text
    accepted = loaded(source(npu, False, engine="auto"), packages, on_gpu=False, before=register)
    assert accepted.strip() == f"CPUExecutionProvider {DOUBLED}"


@pytest.mark.long
def test_onnx_runtime_with_migraphx_built_in_says_that_it_lacks_migraphx(source: Callable[..., ModelSource]) -> None:
    packages = provider_packages("migraphx")
    text = loaded(source(ExecutionAccelerator("migraphx", {"migraphx_hip_graph_enable": "1"})), packages)
    if not text.startswith("UNAVAILABLE"):
        pytest.skip("MIGraphX and a GPU are here")
    assert text.startswith("UNAVAILABLE ONNX Runtime cannot run model.onnx on MIGraphXExecutionProvider: ")
    assert MISSING in text
