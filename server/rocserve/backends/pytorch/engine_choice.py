"""Chooses the engine of a PyTorch model."""

from __future__ import annotations

from dataclasses import replace

from rocserve.backends.base import EngineChoice, EngineSpec, Machine
from rocserve.backends.host import Host
from rocserve.backends.migraphx.engine_choice import MIGRAPHX, has_gpu_for, migraphx_choice
from rocserve.backends.parameters import asked_engine, read_choice
from rocserve.backends.pytorch.installing import torch_command
from rocserve.backends.pytorch.parameters import TORCH_COMPILE, torch_compile_options
from rocserve.core.errors import unavailable
from rocserve.core.model_config import InstanceKind, ModelConfig

GPU_LIBRARIES = ("lib/libtorch_hip.so", "lib/libtorch_cuda.so")
"""Libraries of PyTorch's GPU builds; AMD's comes first."""

EAGER = EngineSpec(
    name="eager",
    module="rocserve.backends.pytorch.eager",
    # Two instances share nothing but the file.
    thread_safe=False,
    # Importing PyTorch takes a second and 200 MB, which only its own workers pay.
    forks_from_zygote=False,
    gpu_module="torch",
    gpu_files=GPU_LIBRARIES,
    takes_kind_model=True,
)

INDUCTOR = replace(EAGER, name="inductor", module="rocserve.backends.pytorch.inductor", compiles_ahead=True)

_LOWERING, _MIGRAPHX_MODULE = "torch_migraphx", "migraphx"
"""torch_migraphx imports migraphx, the Python module of MIGraphX."""

TORCH_MIGRAPHX = replace(
    EAGER,
    name="migraphx",
    module="rocserve.backends.pytorch.torch_migraphx",
    gpu_module=_LOWERING,
    gpu_files=(),
    compiles_ahead=True,
    takes_kind_model=False,
)

MIGRAPHX_ONNX = replace(MIGRAPHX, name="migraphx-onnx", module="rocserve.backends.pytorch.onnx_export")


def choose_engine(config: ModelConfig, machine: Machine) -> EngineChoice:
    """Choose by the parameter `engine`: auto (also the default), eager, inductor, migraphx or migraphx-onnx. Auto is
    inductor if TORCH_COMPILE_OPTIONAL_PARAMETERS asks for it; else migraphx, with eager as the fallback, if an AMD GPU,
    all that migraphx needs and perhaps a program of torch.export are there; else eager. Eager and inductor fall back to
    the CPU as `_with_cpu_fallback` says. A model of KIND_MODEL, whose parts stay on the devices that its file names,
    gets eager or inductor without a fallback. Raises ServeError (INVALID_ARGUMENT) for a wrong parameter, ServeError
    (UNAVAILABLE) if PyTorch is not installed, or if the engine is migraphx-onnx and MIGraphX cannot be used."""
    wanted = read_choice(
        config, "engine", "auto", ("auto", EAGER.name, INDUCTOR.name, TORCH_MIGRAPHX.name, MIGRAPHX_ONNX.name)
    )
    if not machine.is_installed("torch"):
        raise unavailable(
            f"model '{config.name}' needs PyTorch, which is not installed; install it where rocserve is:"
            f" {torch_command(Host())}"
        )
    named = "parameter 'engine' says so"
    if wanted == MIGRAPHX_ONNX.name:
        remedy = "remove the parameter to run the model with PyTorch"
        return replace(migraphx_choice(config, machine, named, remedy), engine=MIGRAPHX_ONNX)
    if wanted == TORCH_MIGRAPHX.name:
        return EngineChoice(TORCH_MIGRAPHX, named, auto_takes_gpus=True)
    auto_takes_gpus = machine.is_installed("torch", GPU_LIBRARIES[:1])
    for engine in (EAGER, INDUCTOR):
        if wanted == engine.name:
            return EngineChoice(engine, named, auto_takes_gpus=auto_takes_gpus)
    choice = EngineChoice(EAGER, "it runs all of PyTorch's files unchanged", auto_takes_gpus=auto_takes_gpus)
    if torch_compile_options(config).is_requested:
        choice = replace(choice, engine=INDUCTOR, reason=f"parameter '{TORCH_COMPILE}' says so")
    if any(group.kind is InstanceKind.MODEL and not group.passive for group in config.instance_groups):
        return choice
    choice = _with_cpu_fallback(choice, config, machine)
    if choice.engine is INDUCTOR or not auto_takes_gpus or not _can_lower(config, machine):
        return choice
    return EngineChoice(TORCH_MIGRAPHX, f"{_LOWERING} and an AMD GPU were found", choice, auto_takes_gpus=True)


def _can_lower(config: ModelConfig, machine: Machine) -> bool:
    """Return whether torch_migraphx and an AMD GPU are available for a file that may be a program of torch.export. Only
    the file's content tells whether it is one."""
    is_other = config.platform in ("torch_aoti", "pytorch_aoti") or config.default_model_filename.endswith(".pt")
    has_gpu = bool(machine.gpus) and has_gpu_for(config, machine)
    return not is_other and has_gpu and all(map(machine.is_installed, (_LOWERING, _MIGRAPHX_MODULE)))


def _with_cpu_fallback(choice: EngineChoice, config: ModelConfig, machine: Machine) -> EngineChoice:
    """Add the same engine on the CPU as the fallback, if an instance may run on a GPU and the configuration accepts the
    CPU. Only a worker finds out that PyTorch's build cannot use a GPU."""
    asks = any(group.kind is InstanceKind.GPU and not group.passive for group in config.instance_groups)
    insists = asks and asked_engine(config) != "auto"
    takes_gpus = choice.auto_takes_gpus or (asks and machine.is_installed("torch", GPU_LIBRARIES))
    if insists or not takes_gpus or not has_gpu_for(config, machine):
        return choice
    return replace(choice, fallback=EngineChoice(replace(choice.engine, gpu_module=""), choice.reason))
