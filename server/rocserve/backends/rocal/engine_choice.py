"""Chooses what runs a pipeline: rocAL itself, or the CPU engine that gives its numbers."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from rocserve.backends.base import ModelSource
from rocserve.backends.installed import is_installed
from rocserve.backends.parameters import read_choice
from rocserve.backends.rocal import ROCAL_MODULE
from rocserve.core.errors import ServeError, invalid_argument, unavailable
from rocserve.core.model_config import InstanceKind


class EngineName(enum.Enum):
    CPU = "cpu"
    ROCAL = "rocal"


@dataclass(frozen=True, slots=True)
class EngineChoice:
    engine: EngineName
    reason: str
    """For the log: goes on after "engine cpu: "."""
    accepts_cpu: bool = False
    """Whether the CPU engine may take its place when rocAL turns out to be unable to run the pipeline."""


def choose_engine(model: ModelSource) -> EngineChoice:
    """By parameter `engine` (auto, cpu, rocal) and the kind of the instance.

    rocAL runs where it is asked for by name, on the GPU or in its own CPU mode, and on KIND_GPU. KIND_GPU is never
    served by the CPU engine unless `engine` is written as "auto".

    Raises:
        ServeError: INVALID_ARGUMENT when the parameter contradicts the kind, UNAVAILABLE when rocAL is not installed.
    """
    names = tuple(name.value for name in EngineName)
    wanted = read_choice(model.config, "engine", "", ("", "auto", *names))
    on_gpu = model.instance_kind is InstanceKind.GPU
    kind = model.instance_kind.value
    if wanted == EngineName.CPU.value:
        if on_gpu:
            raise invalid_argument(
                f"model '{model.name}' asks for KIND_GPU, but its parameter 'engine' is \"cpu\"; use KIND_CPU, or leave"
                " the parameter out"
            )
        return EngineChoice(EngineName.CPU, "parameter 'engine' says so")
    if wanted == EngineName.ROCAL.value:
        if not is_installed(ROCAL_MODULE):
            raise _missing(model, "its parameter 'engine' is \"rocal\"", 'set the parameter to "cpu"')
        return EngineChoice(EngineName.ROCAL, f"parameter 'engine' says so, {kind}")
    if not on_gpu and not _asks_for_gpu(model):
        return EngineChoice(EngineName.CPU, f"the instance is {kind}")
    if on_gpu and is_installed(ROCAL_MODULE):
        return EngineChoice(EngineName.ROCAL, "the instance is KIND_GPU", accepts_cpu=wanted == "auto")
    if wanted != "auto":
        raise _missing(
            model, "it asks for KIND_GPU", "use KIND_CPU, or set parameter 'engine' to \"auto\" to accept the CPU"
        )
    return EngineChoice(
        EngineName.CPU,
        f"KIND_GPU is asked for, but {ROCAL_MODULE} is not installed or there is no GPU; parameter 'engine' is"
        ' "auto", which accepts the CPU',
    )


def _asks_for_gpu(model: ModelSource) -> bool:
    """Whether the instance was meant for a GPU and was given the CPU, because there is no other."""
    groups = model.config.instance_groups
    return bool(groups) and all(group.kind is InstanceKind.GPU for group in groups)


def _missing(model: ModelSource, why: str, remedy: str) -> ServeError:
    return unavailable(
        f"model '{model.name}' needs rocAL, because {why}, but the Python module {ROCAL_MODULE} is not installed;"
        f" install amd-rocal, or {remedy}"
    )
