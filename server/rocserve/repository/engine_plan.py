"""Which engine runs a version, on which workers, and which one takes its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rocserve.backends.base import EngineChoice, EngineSpec, Machine
from rocserve.config.definition import ModelDefinition
from rocserve.repository.instance_plan import plan_workers
from rocserve.workers.group import WorkerPlan


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """An engine, and all that its workers are started with."""

    engine: EngineSpec
    reason: str
    """Why it is this one; goes on after "engine onnxruntime: "."""
    workers: Sequence[WorkerPlan]
    loader: tuple[str, ...]
    """The words before the interpreter in the workers' command."""
    fallback: EngineSpec | None
    """What may take its place when it cannot load the model."""


def plan_engine(definition: ModelDefinition, machine: Machine) -> EnginePlan:
    """The engine that the configuration and the machine lead to.

    Raises:
        ServeError: the engine that is asked for cannot be had here, or an instance cannot have its GPU.
    """
    backend = definition.backend
    assert backend is not None, "an ensemble has no engine"
    return _plan(definition, backend.engine_for(definition.config, machine), machine)


def plan_fallback(definition: ModelDefinition, engine: EngineSpec, reason: str, machine: Machine) -> EnginePlan:
    """The workers of the engine that takes another's place because of `reason`.

    Raises:
        ServeError: INVALID_ARGUMENT, an instance asks for a GPU that this engine cannot have.
    """
    return _plan(definition, EngineChoice(engine, reason), machine)


def _plan(definition: ModelDefinition, choice: EngineChoice, machine: Machine) -> EnginePlan:
    workers = plan_workers(definition.config, choice, machine)
    return EnginePlan(choice.engine, choice.reason, workers, machine.loader(choice.engine), choice.fallback)
