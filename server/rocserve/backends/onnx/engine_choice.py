"""Chooses the engine of an ONNX model: MIGraphX if it and an AMD GPU are available, else ONNX Runtime."""

from __future__ import annotations

from dataclasses import replace

from rocserve.backends.base import EngineChoice, EngineSpec, Machine
from rocserve.backends.migraphx.engine_choice import MIGRAPHX, aims_at_gpus, has_gpu_for, migraphx_choice
from rocserve.backends.migraphx.options import check_parameters
from rocserve.backends.parameters import read_choice
from rocserve.core.errors import invalid_argument, unavailable
from rocserve.core.model_config import InstanceKind, ModelConfig
from rocserve.core.ragged import RaggedBatching

ONNXRUNTIME = EngineSpec(
    name="onnxruntime",
    module="rocserve.backends.onnx.backend",
    thread_safe=True,
    forks_from_zygote=True,
    shares_process=True,
    preload=("onnxruntime",),
    gpu_module="onnxruntime",
    gpu_files=tuple(f"capi/libonnxruntime_providers_{name}.so" for name in ("migraphx", "rocm", "cuda")),
    gpu_plugins=("onnxruntime_ep_migraphx",),
)
"""ONNX Runtime's package for the CPU has none of the `gpu_files`. From ROCm 10 on, MIGraphX's provider is a plugin."""


def choose_engine(config: ModelConfig, machine: Machine) -> EngineChoice:
    """Choose by the parameter `engine`: auto (also the default), migraphx, onnxruntime, or cpu (ONNX Runtime on the
    CPU). A parameter `target` asks for MIGraphX. This choice never moves a model from a GPU to the CPU: if the engine
    cannot use the GPU, the instances are refused (repository/engine_plan.py). Raises ServeError (INVALID_ARGUMENT) for
    an unknown engine, a wrong parameter, or a model that "migraphx" cannot run; ServeError (UNAVAILABLE) if `engine` is
    "migraphx" and MIGraphX is not installed, or `target` is "gpu" without `engine` and MIGraphX or a GPU is missing."""
    wanted = read_choice(config, "engine", "", ("", "auto", "cpu", ONNXRUNTIME.name, MIGRAPHX.name))
    if wanted in ("cpu", ONNXRUNTIME.name):
        return EngineChoice(ONNXRUNTIME, "parameter 'engine' says so")
    cannot, reason = "", ""
    if RaggedBatching(config):
        cannot = (
            "compiles each shape, so requests of different shapes cannot share a batch there; remove"
            " allow_ragged_batch, batch_input and batch_output"
        )
        reason = "requests of different shapes share a batch, which MIGraphX cannot run"
    elif config.operator_libraries:
        cannot = "takes no custom operators; remove model_operations"
        reason = "the model has custom operators, which only ONNX Runtime takes"
    if cannot and wanted == MIGRAPHX.name:
        raise invalid_argument(
            f"model '{config.name}': MIGraphX {cannot}, or set parameter 'engine' to \"onnxruntime\""
        )
    if cannot:
        return EngineChoice(ONNXRUNTIME, reason)
    if wanted == MIGRAPHX.name:
        remedy = 'set the parameter to "auto" or "onnxruntime" to have ONNX Runtime serve the model'
        return migraphx_choice(config, machine, "parameter 'engine' says so", remedy)
    if not config.gpu_accelerators:
        # Parameters that are wrong for MIGraphX are refused on every machine, because ONNX Runtime would not notice
        # them. Accelerators are not checked here: they may hold parameters for ONNX Runtime's own MIGraphX provider.
        check_parameters(config)
    if not aims_at_gpus(config):
        if machine.migraphx:
            return EngineChoice(ONNXRUNTIME, f"parameter 'target' is for MIGraphX, but {machine.migraphx}")
        return migraphx_choice(config, machine, "parameter 'target' says so", "", ONNXRUNTIME)
    choice = _choose_by_machine(config, machine)
    if choice.engine is ONNXRUNTIME and not wanted and config.parameters.get("target", "").strip():
        raise unavailable(
            f"model '{config.name}' needs MIGraphX's target gpu, because 'target' is \"gpu\", but {choice.reason}; set"
            " 'target' to \"ref\", or parameter 'engine' to \"auto\" to accept ONNX Runtime"
        )
    return choice


def _choose_by_machine(config: ModelConfig, machine: Machine) -> EngineChoice:
    groups = [group for group in config.instance_groups if not group.passive]
    if groups and all(group.kind is InstanceKind.CPU for group in groups):
        return EngineChoice(ONNXRUNTIME, "the instances are KIND_CPU")
    if not has_gpu_for(config, machine):
        return EngineChoice(ONNXRUNTIME, "no AMD GPU was found; without one MIGraphX runs only models that name it")
    if machine.migraphx:
        # ONNX Runtime may bring its own MIGraphX.
        has_provider = replace(ONNXRUNTIME, gpu_files=ONNXRUNTIME.gpu_files[:2]).has_gpu_parts(machine)
        what = "an AMD GPU was found" if machine.gpus else "its instances name GPUs, and none was found"
        return EngineChoice(ONNXRUNTIME, f"{what}, but {machine.migraphx}", auto_takes_gpus=has_provider)
    # Wrong parameters are refused here: ONNX Runtime, which takes over if MIGraphX fails, would not notice them.
    return migraphx_choice(config, machine, "MIGraphX and an AMD GPU were found", "", ONNXRUNTIME)
