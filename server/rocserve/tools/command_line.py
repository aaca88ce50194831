"""What a tool's command line says of the model, instead of its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CommandLine:
    parameters: Mapping[str, str] = field(default_factory=dict)
    """By the names that config.pbtxt's `parameters` have."""
    batch_sizes: tuple[int, ...] = ()
    """Empty: the model's own."""
    calibration_data: Path | None = None
    config_name: str = ""
    """Which of the model's configs/ is read, where it exists."""
