"""Compares this machine with the machine that a package of AOTInductor was compiled for.

PyTorch's own loader compares them, too, but it makes the C++ compiler test this processor's instruction sets in every
process that loads a package.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from typing import Any

import torch

_INSTRUCTION_SETS = {
    "AVX2": "_is_avx2_supported",
    "AVX512": "_is_avx512_supported",
    "AVX512_VNNI": "_is_vnni_supported",
    "AMX_TILE": "_is_amx_tile_supported",
}
"""The functions of torch.cpu that tell whether this processor has an instruction set, by PyTorch's name for the set."""


def missing_features(metadata: Mapping[str, str], gpu: int) -> list[str]:
    """Return the properties in a package's metadata that this machine lacks. `gpu`: the GPU's number; -1 = the
    first."""
    own = {"AOTI_PLATFORM": sys.platform, "AOTI_MACHINE": platform.machine()}
    found = [metadata[key] for key, here in own.items() if metadata.get(key, here) != here]
    if not found:
        found += [each for each in metadata.get("AOTI_CPU_ISA", "").split() if not _has_instructions(each)]
    capability = metadata.get("AOTI_COMPUTE_CAPABILITY", "")
    if capability and torch.cuda.is_available() and capability != _capability(max(gpu, 0)):
        found.append(f"compute capability {capability}")
    return found


def _has_instructions(name: str) -> bool:
    tell: Any = getattr(torch.cpu, _INSTRUCTION_SETS.get(name, ""), None)
    return tell is None or bool(tell())


def _capability(gpu: int) -> str:
    """Return the GPU's architecture in the metadata's form."""
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(gpu).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(gpu)
    return str(10 * major + minor)
