"""Damaged copies of PyTorch files: none gives wrong values, none hurts more than the process that loads it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.pytorch import TorchFiles, has_compiler

FILES = 150
SCRIPT = Path(__file__).parents[2] / "support/pytorch_damage.py"
"""Runs as a separate process, so that PyTorch is imported once, and not here."""

pytestmark = pytest.mark.long


def test_damaged_files_and_hostile_ones(
    torch_files: TorchFiles, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    packages = str(request.getfixturevalue("torch_packages").folder) if has_compiler() else "-"
    command = [sys.executable, str(SCRIPT), str(torch_files.folder), packages, str(tmp_path), str(FILES)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=880, check=True)
    counts = json.loads(ran.stdout)
    hostile = {name: counts.pop(name) for name in [*counts] if name.startswith("hostile")}
    # The bomb has other weights with a right checksum; bytes beyond their size are not read.
    assert hostile == {"hostile refused": 4, "hostile wrong": 1, "hostile obeyed": 0}
    # The checksum of a replaced member is right; PyTorch may crash on it, or take it for weights.
    ends = ("served", "refused", "wrong", "failed", "crashed")
    assert set(counts) <= {"served", "refused", *(f"member {end}" for end in ends)}
    assert sum(counts.values()) == FILES
    assert counts["refused"] > FILES / 2
