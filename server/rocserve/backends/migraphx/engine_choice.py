"""Chooses MIGraphX for a model, and has the rules that the onnx backend shares."""

from __future__ import annotations

from rocserve.backends.base import EngineChoice, EngineSpec, Machine
from rocserve.backends.migraphx.options import check_parameters
from rocserve.backends.parameters import read_choice
from rocserve.core.errors import unavailable
from rocserve.core.model_config import InstanceKind, ModelConfig

MIGRAPHX = EngineSpec(
    name="migraphx",
    module="rocserve.backends.migraphx.engine",
    # On a GPU a program has one scratch memory, so only one run at a time is possible.
    thread_safe=False,
    forks_from_zygote=False,
    needs_migraphx=True,
)


def choose_migraphx(config: ModelConfig, machine: Machine) -> EngineChoice:
    """Choose MIGraphX for a backend that has no other engine. The parameter `engine` is auto or migraphx. Raises
    ServeError (INVALID_ARGUMENT) for another engine, ServeError (UNAVAILABLE) if MIGraphX is not installed."""
    read_choice(config, "engine", "auto", ("auto", MIGRAPHX.name))
    return migraphx_choice(config, machine, f"the only one of backend '{config.backend}'", "")


def migraphx_choice(
    config: ModelConfig, machine: Machine, reason: str, remedy: str, fallback: EngineSpec | None = None
) -> EngineChoice:
    """Return MIGraphX as the choice, because of `reason`. `remedy`: an alternative to installing MIGraphX; "" = none.
    Raises ServeError (UNAVAILABLE) with a remedy if MIGraphX cannot be used, ServeError (INVALID_ARGUMENT) for a wrong
    parameter."""
    if machine.migraphx:
        other_way = f"; or {remedy}" if remedy else ""
        raise unavailable(f"model '{config.name}' needs MIGraphX ({reason}): {machine.migraphx}{other_way}")
    check_parameters(config)
    instead = None if fallback is None else EngineChoice(fallback, f"instead of {MIGRAPHX.name}")
    return EngineChoice(MIGRAPHX, reason, instead, auto_takes_gpus=aims_at_gpus(config))


def aims_at_gpus(config: ModelConfig) -> bool:
    """Return whether the parameter `target` allows a GPU: it is "gpu", or not set."""
    return config.parameters.get("target", "").strip().lower() not in ("cpu", "ref")


def has_gpu_for(config: ModelConfig, machine: Machine) -> bool:
    """Return whether an instance that may run on a GPU can get one: of the machine, or named by a KIND_GPU group."""
    groups = [group for group in config.instance_groups if not group.passive]
    if not groups:
        return bool(machine.gpus)
    return any(
        group.kind is not InstanceKind.CPU and (machine.gpus or (group.kind is InstanceKind.GPU and group.gpus))
        for group in groups
    )
