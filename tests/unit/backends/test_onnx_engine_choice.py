"""The engine that runs an ONNX model, and the engine of a compiled program: by configuration and machine."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from support.machine import ToldMachine

from rocserve.backends.migraphx import BACKEND as MIGRAPHX_BACKEND
from rocserve.backends.onnx import BACKEND as ONNX_BACKEND
from rocserve.backends.onnx.engine_choice import ONNXRUNTIME
from rocserve.backends.tensorflow import BACKEND as TENSORFLOW_BACKEND
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import InstanceGroup, InstanceKind, ModelConfig

WITHOUT = ToldMachine(migraphx="MIGraphX is not in /opt/rocm/lib")
WITHOUT_GPU = ToldMachine(migraphx="")
WITH_BOTH = ToldMachine(gpus=(0, 1), migraphx="")
WITH_GPU_ONLY = ToldMachine(gpus=(0,), migraphx="MIGraphX is not in /opt/rocm/lib")


def config(*kinds: InstanceKind, gpus: tuple[int, ...] = (), **parameters: str) -> ModelConfig:
    groups = tuple(InstanceGroup("", kind, 1, gpus) for kind in kinds)
    return ModelConfig("m", backend="some", instance_groups=groups, parameters=parameters)


@pytest.mark.parametrize(
    ("model", "machine", "engine", "fallback"),
    [
        (config(), WITH_BOTH, "migraphx", "onnxruntime"),
        (config(InstanceKind.AUTO), WITH_BOTH, "migraphx", "onnxruntime"),
        (config(InstanceKind.GPU), WITH_BOTH, "migraphx", "onnxruntime"),
        (config(InstanceKind.GPU, engine="auto"), WITH_BOTH, "migraphx", "onnxruntime"),
        (config(InstanceKind.CPU, InstanceKind.AUTO), WITH_BOTH, "migraphx", "onnxruntime"),
        (config(InstanceKind.CPU), WITH_BOTH, "onnxruntime", None),
        (config(InstanceKind.CPU, engine="auto"), WITH_BOTH, "onnxruntime", None),
        (config(engine="onnxruntime"), WITH_BOTH, "onnxruntime", None),
        (config(engine="cpu"), WITH_BOTH, "onnxruntime", None),
        (config(), WITHOUT_GPU, "onnxruntime", None),
        (config(InstanceKind.GPU, engine="auto"), WITHOUT_GPU, "onnxruntime", None),
        (config(InstanceKind.GPU, gpus=(2,)), WITHOUT_GPU, "migraphx", "onnxruntime"),
        (config(), WITH_GPU_ONLY, "onnxruntime", None),
        (config(engine="migraphx"), WITHOUT_GPU, "migraphx", None),
        (config(InstanceKind.CPU, engine="migraphx"), WITH_BOTH, "migraphx", None),
        (config(target="ref"), WITHOUT_GPU, "migraphx", "onnxruntime"),
        (config(InstanceKind.CPU, target="REF"), WITHOUT_GPU, "migraphx", "onnxruntime"),
        (config(InstanceKind.CPU, target="cpu", engine="auto"), WITH_BOTH, "migraphx", "onnxruntime"),
        (config(target="ref", engine="onnxruntime"), WITHOUT_GPU, "onnxruntime", None),
        (config(target="ref"), WITHOUT, "onnxruntime", None),
        (config(target="gpu"), WITH_BOTH, "migraphx", "onnxruntime"),
        (config(target="gpu", engine="auto"), WITHOUT_GPU, "onnxruntime", None),
    ],
)
def test_onnx_models(model: ModelConfig, machine: ToldMachine, engine: str, fallback: str | None) -> None:
    choice = ONNX_BACKEND.engine_for(model, machine)
    assert choice.engine.name == engine
    assert (choice.fallback.engine.name if choice.fallback else None) == fallback


@pytest.mark.parametrize(
    ("model", "machine", "reason"),
    [
        (config(), WITH_BOTH, "MIGraphX and an AMD GPU were found"),
        (config(), WITHOUT_GPU, "no AMD GPU was found; without one MIGraphX runs only models that name it"),
        (config(), WITH_GPU_ONLY, "an AMD GPU was found, but MIGraphX is not in /opt/rocm/lib"),
        (
            config(InstanceKind.GPU, gpus=(2,)),
            WITHOUT,
            "its instances name GPUs, and none was found, but MIGraphX is not in /opt/rocm/lib",
        ),
        (config(InstanceKind.CPU), WITH_BOTH, "the instances are KIND_CPU"),
        (config(engine="cpu"), WITH_BOTH, "parameter 'engine' says so"),
        (config(engine="migraphx"), WITHOUT_GPU, "parameter 'engine' says so"),
        (config(target="ref"), WITHOUT_GPU, "parameter 'target' says so"),
        (config(target="ref"), WITHOUT, "parameter 'target' is for MIGraphX, but MIGraphX is not in /opt/rocm/lib"),
    ],
)
def test_why(model: ModelConfig, machine: ToldMachine, reason: str) -> None:
    assert ONNX_BACKEND.engine_for(model, machine).reason == reason


def test_passive_groups_do_not_count() -> None:
    passive = InstanceGroup("", InstanceKind.GPU, 1, (0,), passive=True)
    model = ModelConfig("m", instance_groups=(passive, InstanceGroup("", InstanceKind.CPU, 1)))
    assert ONNX_BACKEND.engine_for(model, WITH_BOTH).engine.name == "onnxruntime"


@pytest.mark.parametrize(("target", "expected"), [("", True), ("gpu", True), ("cpu", False), ("ref", False)])
def test_auto_goes_to_the_gpus_unless_another_target_is_written(target: str, expected: bool) -> None:
    for backend in (ONNX_BACKEND, MIGRAPHX_BACKEND):
        assert backend.engine_for(config(target=target), WITH_BOTH).auto_takes_gpus is expected
    assert ONNX_BACKEND.engine_for(config(target=target, engine="migraphx"), WITH_BOTH).auto_takes_gpus is expected


def test_migraphx_that_is_named_but_not_there() -> None:
    with pytest.raises(ServeError) as caught:
        ONNX_BACKEND.engine_for(config(engine="migraphx"), WITHOUT)
    assert caught.value.code is StatusCode.UNAVAILABLE
    assert caught.value.text == (
        "model 'm' needs MIGraphX (parameter 'engine' says so): MIGraphX is not in /opt/rocm/lib; or set the parameter"
        ' to "auto" or "onnxruntime" to have ONNX Runtime serve the model'
    )


@pytest.mark.parametrize("backend", [MIGRAPHX_BACKEND, TENSORFLOW_BACKEND])
def test_what_only_migraphx_runs(backend) -> None:
    for engine in ({}, {"engine": "auto"}, {"engine": "migraphx"}):
        choice = backend.engine_for(config(InstanceKind.CPU, **engine), WITHOUT_GPU)
        assert (choice.engine.name, choice.fallback, choice.reason) == (
            "migraphx",
            None,
            "the only one of backend 'some'",
        )
    with pytest.raises(
        ServeError,
        match=r"^model 'm' needs MIGraphX \(the only one of backend 'some'\): MIGraphX is not in /opt/rocm/lib$",
    ):
        backend.engine_for(config(), WITHOUT)
    with pytest.raises(ServeError, match='must be one of auto, migraphx, not "onnxruntime"'):
        backend.engine_for(config(engine="onnxruntime"), WITH_BOTH)


def test_an_engine_that_nobody_knows() -> None:
    with pytest.raises(ServeError, match=r'must be one of auto, cpu, onnxruntime, migraphx, not "tensorrt"'):
        ONNX_BACKEND.engine_for(config(engine="tensorrt"), WITH_BOTH)


@pytest.mark.parametrize(
    ("machine", "why"),
    [
        (WITHOUT_GPU, "no AMD GPU was found; without one MIGraphX runs only models that name it"),
        (WITH_GPU_ONLY, "an AMD GPU was found, but MIGraphX is not in /opt/rocm/lib"),
    ],
)
def test_the_target_gpu_is_not_moved_to_the_cpu(machine: ToldMachine, why: str) -> None:
    with pytest.raises(ServeError) as caught:
        ONNX_BACKEND.engine_for(config(target="gpu"), machine)
    assert caught.value.code is StatusCode.UNAVAILABLE
    assert caught.value.text == (
        f"model 'm' needs MIGraphX's target gpu, because 'target' is \"gpu\", but {why}; set 'target' to \"ref\", or"
        " parameter 'engine' to \"auto\" to accept ONNX Runtime"
    )
    with pytest.raises(ServeError, match="'target' is \"gpu\", but the instance is KIND_CPU; use KIND_GPU"):
        ONNX_BACKEND.engine_for(config(InstanceKind.CPU, target="gpu"), machine)


@pytest.mark.parametrize("wrong", [{"precision": "fp15"}, {"batch_sizes": "4,0"}, {"precision": "int8"}])
def test_a_wrong_parameter_is_refused_before_another_engine_could_pass_it_over(wrong: dict[str, str]) -> None:
    for model in (config(**wrong), config(InstanceKind.GPU, **wrong), config(engine="migraphx", **wrong)):
        for machine in (WITH_BOTH, WITHOUT_GPU):
            with pytest.raises(ServeError) as caught:
                ONNX_BACKEND.engine_for(model, machine)
            assert caught.value.code is StatusCode.INVALID_ARGUMENT
    assert ONNX_BACKEND.engine_for(config(engine="onnxruntime", **wrong), WITH_BOTH).engine.name == "onnxruntime"


def test_amds_plugin_makes_onnx_runtime_one_for_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ONNXRUNTIME.gpu_module == "onnxruntime"
    if ONNXRUNTIME.has_gpu_parts(WITH_GPU_ONLY):
        pytest.skip("the installed ONNX Runtime is for GPUs")
    assert not ONNX_BACKEND.engine_for(config(), WITH_GPU_ONLY).auto_takes_gpus
    # PyPI's package of this name holds nothing.
    (tmp_path / "onnxruntime_ep_migraphx-0.0.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not ONNXRUNTIME.has_gpu_parts(WITH_GPU_ONLY)
    (tmp_path / "onnxruntime_ep_migraphx").mkdir()
    (tmp_path / "onnxruntime_ep_migraphx" / "__init__.py").write_text("raise SystemExit('not imported by the server')")
    importlib.invalidate_caches()
    assert ONNXRUNTIME.has_gpu_parts(WITH_GPU_ONLY)
    assert ONNX_BACKEND.engine_for(config(), WITH_GPU_ONLY).auto_takes_gpus
    assert ONNX_BACKEND.engine_for(config(engine="auto"), WITH_GPU_ONLY).auto_takes_gpus
