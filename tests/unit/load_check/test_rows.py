"""Whether rows are independent, decided by ONNX Runtime on made-up inputs."""

from __future__ import annotations

import pytest
from support.load_check import load
from support.row_models import DEPENDENT, INDEPENDENT, NEVER_INDEPENDENT

from rocserve.load_check.rows import Independence

_SEEDS = range(5)


@pytest.mark.parametrize("name", INDEPENDENT)
def test_finds_independent_rows(name: str) -> None:
    loaded = load(INDEPENDENT[name]())
    verdicts = [loaded.check(seed) for seed in _SEEDS]
    assert {(verdict.state, verdict.reason) for verdict in verdicts} == {
        (Independence.INDEPENDENT, "rows are independent")
    }


@pytest.mark.parametrize("name", DEPENDENT)
def test_finds_dependent_rows(name: str) -> None:
    loaded = load(DEPENDENT[name]())
    verdicts = [loaded.check(seed) for seed in _SEEDS]
    assert {verdict.state for verdict in verdicts} == {Independence.DEPENDENT}, verdicts[0].reason
    assert all(verdict.reason.startswith("rows depend on each other: ") for verdict in verdicts)


@pytest.mark.parametrize("name", NEVER_INDEPENDENT)
def test_never_takes_dependent_rows_for_independent(name: str) -> None:
    loaded = load(NEVER_INDEPENDENT[name]())
    assert Independence.INDEPENDENT not in {loaded.check(seed).state for seed in range(20)}
