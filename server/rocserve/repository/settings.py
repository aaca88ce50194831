"""What the repository is told at the start."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

from rocserve.core.model_config import InstanceKind


class ControlMode(enum.Enum):
    """Who says which models are loaded (tritonserver's --model-control-mode)."""

    NONE = "none"
    """All that is in the repository when the server starts."""
    POLL = "poll"
    """All that is in the repository, whenever it changes."""
    EXPLICIT = "explicit"
    """What `load_models` and clients name."""


@dataclass(frozen=True, slots=True)
class RepositorySettings:
    roots: tuple[Path, ...]
    control_mode: ControlMode = ControlMode.POLL
    poll_seconds: float = 15.0
    """How often the folders are looked at when no notification comes."""
    settle_seconds: float = 0.5
    """How long a model's files must have stayed as they are before a change counts."""
    load_models: tuple[str, ...] = ()
    """What is loaded at the start in explicit mode; "*" = all."""
    strict_model_config: bool = False
    """Nothing is completed from the model file."""
    model_config_name: str = ""
    """Read configs/<name>.pbtxt of a model instead of config.pbtxt."""
    default_instance_kind: InstanceKind = InstanceKind.AUTO
    """Of the instance group that a model without one gets."""
    strict_readiness: bool = True
    """Ready only when all models are; else as soon as the first loads have ended."""
    concurrent_loads: int = 4
    retry_seconds: float = 1.0
    """The pause before a failed load is tried again; doubled at each failure."""
    longest_retry_seconds: float = 300.0
