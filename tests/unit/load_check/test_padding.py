"""Whether an open dimension may be padded, decided by ONNX Runtime on made-up inputs."""

from __future__ import annotations

import numpy as np
import pytest
from support.padded_models import ALLOWED, REFUSED, UNDECIDED

from rocserve.load_check.padding_verdict import PaddingState

_SEEDS = range(5)


@pytest.mark.parametrize("name", ALLOWED)
def test_finds_what_may_be_padded(name: str) -> None:
    padded = ALLOWED[name]
    verdicts = [padded.check(seed) for seed in _SEEDS]
    assert {one.state for verdict in verdicts for one in verdict.dimensions} == {PaddingState.ALLOWED}, verdicts[0]
    assert all(verdict.values == padded.found for verdict in verdicts)


@pytest.mark.parametrize("name", REFUSED)
def test_finds_what_must_not_be_padded(name: str) -> None:
    verdicts = [REFUSED[name].check(seed) for seed in _SEEDS]
    assert {one.state for verdict in verdicts for one in verdict.dimensions} == {PaddingState.REFUSED}, verdicts[0]


@pytest.mark.parametrize("name", UNDECIDED)
def test_decides_nothing_where_nothing_shows(name: str) -> None:
    verdicts = [UNDECIDED[name].check(seed) for seed in _SEEDS]
    assert {one.state for verdict in verdicts for one in verdict.dimensions} == {PaddingState.UNDECIDED}, verdicts[0]


def test_samples_are_cut_to_short_inputs() -> None:
    """Only texts of digits can be cast to numbers, and hardly a made-up text is one."""
    texts, values = np.array(["1", "20", "3"], object), np.random.default_rng(0).random((3, 12), np.float32)
    verdict = UNDECIDED["texts for numbers"].check(0, samples=[{"s": texts, "x": values}])
    assert [one.state for one in verdict.dimensions] == [PaddingState.ALLOWED], verdict
