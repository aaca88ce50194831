"""An object that a detector found in an image."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Detection:
    label: str
    class_index: int
    score: float
    box: tuple[float, float, float, float]
    """x1, y1, x2, y2 in pixels."""
