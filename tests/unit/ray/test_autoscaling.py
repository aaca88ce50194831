"""The autoscaling policy; tests/e2e checks that Serve follows it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rocserve.ray.autoscaling import QueuePolicy


def context(ongoing: float, metrics: dict[str, dict[str, float]] | None) -> Any:
    config = SimpleNamespace(get_target_ongoing_requests=lambda: 10)
    return SimpleNamespace(aggregated_metrics=metrics, total_num_requests=ongoing, config=config)


@pytest.mark.parametrize(
    ("ongoing", "metrics", "wanted"),
    [
        pytest.param(40, {"queued": {"a": 1.0, "b": 0.0}}, 4, id="Serve's own rule, where servers have no queue"),
        pytest.param(5, {"queued": {"a": 9.0, "b": 3.0}}, 6, id="queues of few calls: streams"),
        pytest.param(40, None, 4, id="no replica has told of its queue yet"),
        pytest.param(0, {"queued": {"a": 0.0}}, 0, id="nothing to do"),
    ],
)
def test_replicas_are_as_many_as_queues_or_calls_need(
    ongoing: float, metrics: dict[str, dict[str, float]] | None, wanted: float
) -> None:
    assert QueuePolicy(queued=2)(context(ongoing, metrics)) == (wanted, {})
