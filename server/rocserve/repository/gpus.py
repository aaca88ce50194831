"""Which AMD GPUs this process may use, found out without loading a GPU library."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

_VARIABLE = "HIP_VISIBLE_DEVICES"

_TOPOLOGY = Path("/sys/class/kfd/kfd/topology/nodes")
"""The kernel driver's list of what computes: a folder a node, CPUs among them. What a container may not use cannot be
read there."""


def visible_gpus(environment: Mapping[str, str] = os.environ, topology: Path = _TOPOLOGY) -> Sequence[int]:
    """Their numbers, as HIP_VISIBLE_DEVICES of a worker takes them: those in this process' own variable, else all."""
    chosen = environment.get(_VARIABLE)
    if chosen is not None:
        return tuple(int(number) for number in chosen.split(",") if number.strip().isdecimal())
    return range(sum(_is_gpu(node) for node in topology.glob("*/properties")))


def _is_gpu(properties: Path) -> bool:
    """Whether a node has SIMD units, which CPUs are listed without."""
    try:
        fields = dict(line.split(maxsplit=1) for line in properties.read_text().splitlines() if " " in line)
    except OSError:
        return False
    return int(fields.get("simd_count", "0")) > 0
