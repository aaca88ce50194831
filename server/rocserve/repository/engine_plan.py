"""Which engine runs a version, on which workers, and which one takes its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rocserve.backends.base import EngineChoice, EngineSpec, Machine
from rocserve.config.definition import ModelDefinition
from rocserve.core.errors import ServeError
from rocserve.core.model_config import InstanceKind
from rocserve.repository.instance_plan import group_places, plan_workers
from rocserve.workers.messages import WorkerPlan


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
    model_bytes: int
    """Of the version's files."""
    places: Sequence[tuple[InstanceKind, Sequence[int]]] = ()
    """Of each instance group: the kind that it has in the end, and its GPUs."""


def plan_engine(definition: ModelDefinition, version_folder: Path, machine: Machine) -> EnginePlan:
    """The engine that the configuration and the machine lead to.

    Raises:
        ServeError: the engine that is asked for cannot be had here, or an instance cannot have its GPU.
    """
    backend = definition.backend
    assert backend is not None, "an ensemble has no engine"
    model_bytes = sum(file.stat().st_size for file in version_folder.rglob("*") if file.is_file())
    return _plan(definition, backend.engine_for(definition.config, machine), machine, model_bytes)


@dataclass(frozen=True, slots=True)
class EngineFailure:
    """An engine could not load a model."""

    plan: EnginePlan
    error: ServeError

    @property
    def text(self) -> str:
        return f"engine {self.plan.engine.name} cannot load it: {self.error.text}"

    def plan_in_its_place(self, definition: ModelDefinition, machine: Machine) -> EnginePlan:
        """The engine that takes over, and its workers.

        Raises:
            ServeError: the failure itself, where no engine may take over, with why not.
        """
        fallback = self.plan.fallback
        if fallback is None:
            raise self.error
        choice = EngineChoice(fallback, f"in the place of {self.plan.engine.name}")
        try:
            return replace(_plan(definition, choice, machine, self.plan.model_bytes), reason=self.text)
        except ServeError as refusal:
            text = f"{self.error.text}; engine {fallback.name} does not take its place: {refusal.text}"
            raise ServeError(self.error.code, text) from None

    def and_then(self, engine: EngineSpec, error: ServeError) -> ServeError:
        """What to say when the engine that took over cannot load the model either."""
        return ServeError(error.code, f"engine {engine.name}: {error.text}; before, {self.text}")


def _plan(definition: ModelDefinition, choice: EngineChoice, machine: Machine, model_bytes: int) -> EnginePlan:
    workers = plan_workers(definition.config, choice, machine, model_bytes)
    places = group_places(definition.config, choice, machine)
    loader = machine.loader(choice.engine)
    return EnginePlan(choice.engine, choice.reason, workers, loader, choice.fallback, model_bytes, places)
