"""Chooses what runs a PyTorch model."""

from __future__ import annotations

from rocserve.backends.base import EngineChoice, EngineSpec, Machine
from rocserve.backends.parameters import read_choice
from rocserve.core.errors import unavailable
from rocserve.core.model_config import ModelConfig

_GPU_LIBRARIES = ("lib/libtorch_hip.so", "lib/libtorch_cuda.so")
"""Of PyTorch's builds for GPUs; AMD's comes first."""

EAGER = EngineSpec(
    name="eager",
    module="rocserve.backends.pytorch.eager",
    # Two instances have nothing in common but the file.
    thread_safe=False,
    # PyTorch takes a second and 200 MB to import, which only its own workers are to pay.
    forks_from_zygote=False,
    gpu_module="torch",
    gpu_files=_GPU_LIBRARIES,
)

INSTALL = (
    "install it where rocserve is: pip install torch --index-url https://download.pytorch.org/whl/cpu (for the CPU; of"
    " AMD's GPUs see pytorch.org)"
)


def choose_engine(config: ModelConfig, machine: Machine) -> EngineChoice:
    """By parameter `engine`: auto (also when it is left out) or eager.

    Raises:
        ServeError: INVALID_ARGUMENT for another engine, UNAVAILABLE where PyTorch is not installed.
    """
    wanted = read_choice(config, "engine", "auto", ("auto", EAGER.name))
    if not machine.is_installed("torch"):
        raise unavailable(f"model '{config.name}' needs PyTorch, which is not installed; {INSTALL}")
    auto_takes_gpus = machine.is_installed("torch", _GPU_LIBRARIES[:1])
    reason = "parameter 'engine' says so" if wanted == EAGER.name else "it runs all of PyTorch's files as they are"
    return EngineChoice(EAGER, reason, auto_takes_gpus=auto_takes_gpus)
