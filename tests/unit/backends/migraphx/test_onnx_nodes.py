"""ONNX's own tests of its operators, the first of each: MIGraphX serves the model with ONNX Runtime's answer, or the
load refuses it, and ONNX Runtime takes over. `python -m benchmarks.onnx_nodes` runs all of the tests."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.onnx_nodes import CAUGHT, HARMLESS, MISSED, REFUSED, RIGHT, outcomes

pytestmark = pytest.mark.long


def test_no_operator_is_served_with_wrong_answers(migraphx_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCSERVE_MIGRAPHX_ROOT", str(migraphx_root))
    found = {name: (outcome, why) for name, outcome, why in outcomes(is_sample=True)}
    assert {name: why for name, (outcome, why) in found.items() if outcome == MISSED} == {}
    counts = Counter(outcome for outcome, _ in found.values())
    assert counts[RIGHT] >= 70 and counts[CAUGHT] and counts[REFUSED], counts
    for outcome, why in found.values():
        if outcome in (CAUGHT, HARMLESS):
            assert "does not compute what ONNX Runtime computes" in why
