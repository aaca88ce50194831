"""Chooses MIGraphX for a model: for the backends that have no other engine, and the rules that others share."""

from __future__ import annotations

from rocserve.backends.base import EngineChoice, EngineSpec, Machine
from rocserve.backends.migraphx.configuration.options import check_parameters
from rocserve.backends.parameters import read_choice
from rocserve.core.errors import unavailable
from rocserve.core.model_config import InstanceKind, ModelConfig

MIGRAPHX = EngineSpec(
    name="migraphx",
    module="rocserve.backends.migraphx.engine",
    # On a GPU a program's scratch memory belongs to the program: one run at a time.
    thread_safe=False,
    forks_from_zygote=False,
    needs_migraphx=True,
)


_OTHER_TARGETS = ("cpu", "ref")
"""What the parameter `target` may say instead of "gpu"."""


def choose_migraphx(config: ModelConfig, machine: Machine) -> EngineChoice:
    """MIGraphX, for models that nothing else runs. Parameter `engine` may say auto or migraphx. Raises: ServeError:
    INVALID_ARGUMENT for another engine, UNAVAILABLE when MIGraphX is not here."""
    read_choice(config, "engine", "auto", ("auto", MIGRAPHX.name))
    return migraphx_choice(config, machine, f"the only one of backend '{config.backend}'", "")


def migraphx_choice(
    config: ModelConfig, machine: Machine, reason: str, remedy: str, fallback: EngineSpec | None = None
) -> EngineChoice:
    """MIGraphX because of `reason`. `remedy`: what else to do than to install it, "" = nothing. Raises: ServeError:
    UNAVAILABLE with why it cannot be used and what to do, INVALID_ARGUMENT for a wrong parameter."""
    if machine.migraphx:
        other_way = f"; or {remedy}" if remedy else ""
        raise unavailable(f"model '{config.name}' needs MIGraphX ({reason}): {machine.migraphx}{other_way}")
    check_parameters(config)
    instead = None if fallback is None else EngineChoice(fallback, f"in the place of {MIGRAPHX.name}")
    return EngineChoice(MIGRAPHX, reason, instead, auto_takes_gpus=aims_at_gpus(config))


def aims_at_gpus(config: ModelConfig) -> bool:
    """Whether MIGraphX is to compile for a GPU where it may choose."""
    return config.parameters.get("target", "").strip().lower() not in _OTHER_TARGETS


def has_gpu_for(config: ModelConfig, machine: Machine) -> bool:
    """Whether an instance that may run on a GPU has one: the machine's, or those that its group names."""
    groups = [group for group in config.instance_groups if not group.passive]
    if not groups:
        return bool(machine.gpus)
    return any(
        group.kind is not InstanceKind.CPU and (machine.gpus or (group.kind is InstanceKind.GPU and group.gpus))
        for group in groups
    )
