"""Which names of first dimensions contradict each other."""

from __future__ import annotations

import pytest

from rocserve.load_check.dimension_names import names_disagree


@pytest.mark.parametrize(
    ("inputs", "outputs", "reason"),
    [
        ({"x": "batch"}, {"y": "batch"}, ""),
        ({"x": "batch"}, {"y": "time"}, "output 'y' has 'time' rows, input 'x' has 'batch'"),
        ({"a": "batch", "b": "queries"}, {"y": "batch"}, "input 'b' has 'queries' rows, input 'a' has 'batch'"),
        ({"x": "batch_size"}, {"y": "batch"}, ""),
        ({"x": "N"}, {"y": "batch"}, ""),
        ({"x": "unk__6"}, {"y": "unk__7"}, ""),
        ({"x": "batch"}, {"y": "Reshapey_dim_0"}, ""),
        ({"x": None}, {"y": "batch"}, ""),
        ({"x": "sequence"}, {"y": "sequence"}, ""),
        ({"x": ""}, {"y": 4}, ""),
        ({}, {}, ""),
    ],
)
def test_only_names_of_people_count(inputs: dict[str, object], outputs: dict[str, object], reason: str) -> None:
    assert names_disagree(inputs, outputs) == reason
