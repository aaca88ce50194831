"""Instruction sets that a package of AOTInductor needs and this machine lacks."""

from __future__ import annotations

import importlib.util
import platform
from types import SimpleNamespace

import pytest
from support.pytorch import NO_PYTORCH

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason=NO_PYTORCH)

HERE = {"AOTI_PLATFORM": "linux", "AOTI_MACHINE": platform.machine(), "AOTI_CPU_ISA": "", "AOTI_COMPUTE_CAPABILITY": ""}


@pytest.fixture(autouse=True)
def old_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor with AVX2 and nothing newer."""
    import torch

    for name in ("avx2", "avx512", "vnni", "amx_tile"):
        monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda own=name: own == "avx2", raising=False)


@pytest.mark.parametrize(
    ("metadata", "lacking"),
    [
        ({}, []),
        (HERE, []),
        ({**HERE, "AOTI_CPU_ISA": "AVX2"}, []),
        ({**HERE, "AOTI_CPU_ISA": "AVX512 AVX512_VNNI AMX_TILE"}, ["AVX512", "AVX512_VNNI", "AMX_TILE"]),
        ({**HERE, "AOTI_CPU_ISA": "OF_TOMORROW"}, []),
        ({**HERE, "AOTI_PLATFORM": "win32", "AOTI_MACHINE": "riscv64", "AOTI_CPU_ISA": "AVX512"}, ["win32", "riscv64"]),
    ],
)
def test_of_the_processor(metadata: dict[str, str], lacking: list[str]) -> None:
    from rocserve.backends.pytorch.package import missing_features

    assert missing_features(metadata, -1) == lacking


@pytest.mark.parametrize(("hip", "own"), [(None, "90"), ("7.2", "gfx942")])
def test_of_the_gpu(monkeypatch: pytest.MonkeyPatch, hip: str | None, own: str) -> None:
    import torch

    from rocserve.backends.pytorch.package import missing_features

    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _gpu: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _gpu: properties)
    assert missing_features({**HERE, "AOTI_COMPUTE_CAPABILITY": own}, -1) == []
    assert missing_features({**HERE, "AOTI_COMPUTE_CAPABILITY": "80"}, 1) == ["compute capability 80"]
