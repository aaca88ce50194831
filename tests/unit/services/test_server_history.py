"""What all models together have done: rates between two points, quantiles while somebody looks, what is left out."""

from __future__ import annotations

from typing import Any, cast

import pytest

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.serving import ServedModel, ServingTable, ServingTableHolder
from rocserve.core.statistics import ModelStatistics
from rocserve.protocol.page_pb2 import ServerPoint
from rocserve.services.server_state import ServerHistory


class Version:
    has_statistics = True

    def __init__(self, name: str, pending: int = 0) -> None:
        self.name, self.version, self.pending_requests = name, 1, pending
        self.statistics = ModelStatistics()


class Models:
    def __init__(self) -> None:
        self.holder = ServingTableHolder()
        self.now = 1000.0
        self.history = ServerHistory(self.holder, lambda: self.now)

    def serve(self, *versions: Version, namespace: str = "") -> None:
        models = [ServedModel(one.name, {1: cast(Any, one)}, cast(Any, one), namespace=namespace) for one in versions]
        self.holder.table = ServingTable({model.name: model for model in models})

    def point(self, after_seconds: float = 5.0) -> ServerPoint:
        self.now += after_seconds
        self.history.sample()
        return self.history._points[-1]


def answer(version: Version, milliseconds: int, times: int = 1) -> None:
    for _ in range(times):
        version.statistics.record_cache_hit(0, 1_000_000 * milliseconds)


def test_the_rates_of_all_models_together() -> None:
    models, one, other = Models(), Version("one", pending=3), Version("other", pending=4)
    models.serve(one, other)
    answer(one, 2, times=10)
    answer(other, 6, times=10)
    other.statistics.record_failure(0, 1)
    other.statistics.record_refusal(ServeError(StatusCode.UNAVAILABLE, "full"), 0, 1)
    point = models.point()
    assert (point.answered_rate, point.failed_rate, point.mean_us, point.waiting) == (4.0, 0.4, 4000.0, 7)
    answer(one, 1)
    point = models.point(after_seconds=10.0)
    assert (point.answered_rate, point.failed_rate, point.mean_us) == (0.1, 0.0, 1000.0)
    assert (models.point().answered_rate, models.point().mean_us) == (0.0, 0.0)


def test_a_reload_continues_and_another_load_begins_at_zero() -> None:
    models, version = Models(), Version("m")
    models.serve(version)
    answer(version, 1, times=10)
    models.point()
    reloaded = Version("m")
    reloaded.statistics.continue_from(version.statistics)
    models.serve(reloaded)
    answer(reloaded, 1, times=5)
    assert models.point().answered_rate == 1.0
    loaded_again = Version("m")
    models.serve(loaded_again)
    answer(loaded_again, 1, times=5)
    assert models.point().answered_rate == 1.0
    models.serve()
    assert models.point().answered_rate == 0.0


def test_what_was_never_loaded_is_not_read() -> None:
    class Cold:
        name, version, has_statistics = "cold", 1, False

    models = Models()
    models.serve(cast(Version, Cold()))
    assert models.point().answered_rate == 0.0


def test_quantiles_while_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    models, version = Models(), Version("m")
    models.serve(version)
    answer(version, 1)
    assert models.point().p99_us == 0.0
    end = 10**18
    monkeypatch.setattr("time.monotonic_ns", lambda: end)
    models.history.after(0)
    models.point()
    for milliseconds in range(1, 101):
        version.statistics.record_cache_hit(end - 1_000_000 * milliseconds, end)
    point = models.point()
    assert point.p50_us == pytest.approx(50_000, rel=0.01)
    assert point.p99_us == pytest.approx(99_000, rel=0.01)
    assert models.point(after_seconds=61.0).p99_us == 0.0


def test_only_ten_minutes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    models = Models()
    seconds = 2_000_000_000
    for number in range(200):
        monkeypatch.setattr("time.time_ns", lambda number=number: 1_000_000_000 * (seconds + 5 * number))
        models.point()
    points = models.history.after(0)
    assert [point.at_ms // 1000 - seconds for point in (points[0], points[-1])] == [400, 995]
    assert len(points) == 120
    assert models.history.after(points[-2].at_ms) == [points[-1]]
    # A server that was stopped, or is slow, shows no older points either.
    monkeypatch.setattr("time.time_ns", lambda: 1_000_000_000 * (seconds + 1500))
    assert next(point.at_ms // 1000 - seconds for point in models.history.after(0)) == 905
