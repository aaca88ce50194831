"""The names of tritonserver's flags."""

from __future__ import annotations

from pathlib import Path

RECORDED = Path(__file__).parents[2] / "data" / "triton" / "flags.txt"
"""The names in the help of Triton 2.51, one a line."""


def recorded_flags() -> list[str]:
    return RECORDED.read_text().split()
