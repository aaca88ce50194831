"""The sums of what workers report of the metrics that models define."""

from __future__ import annotations

import logging

import pytest

from rocserve.core.custom_metrics import CustomMetrics, MetricChange, MetricChanges, MetricKind, OwnedMetrics
from rocserve.frontends.metrics.exposition import exposition
from rocserve.workers.messages import decode_message, encode_message


@pytest.fixture
def metrics() -> CustomMetrics:
    return CustomMetrics()


def counted(value: float, labels: dict[str, str] | None = None) -> MetricChange:
    return MetricChange("seen", MetricKind.COUNTER, "What was seen", labels or {}, value)


def changes_of(*changes: MetricChange) -> MetricChanges:
    return MetricChanges(changes)


def text(metrics: CustomMetrics) -> str:
    return exposition(metrics.read())


def test_what_several_workers_count_is_added_up(metrics: CustomMetrics) -> None:
    for owner in ("a", "b"):
        metrics.apply(owner, changes_of(counted(2), counted(1.5, {"kind": "x"})))
        metrics.apply(owner, changes_of(counted(1)))
    assert text(metrics) == ('# HELP seen What was seen\n# TYPE seen counter\nseen 6.0\nseen{kind="x"} 3.0\n')


def test_a_gauge_is_what_it_was_set_to_last_and_what_was_added_since(metrics: CustomMetrics) -> None:
    def gauge(value: float, is_set: bool) -> MetricChanges:
        return changes_of(MetricChange("level", MetricKind.GAUGE, "", {}, value, is_set))

    for changes in (gauge(5.0, True), gauge(3.0, True), gauge(-1.0, False)):
        metrics.apply("a", changes)
    assert text(metrics).splitlines()[-1] == "level 2.0"


def test_histograms(metrics: CustomMetrics) -> None:
    for counts, total in (((1, 0, 2), 9.5), ((0, 3, 0), 2.0)):
        metrics.apply(
            "a",
            changes_of(MetricChange("took", MetricKind.HISTOGRAM, "", {"a": "b"}, total, False, (0.5, 1.0), counts)),
        )
    assert text(metrics).splitlines()[2:] == [
        'took_count{a="b"} 6',
        'took_sum{a="b"} 11.5',
        'took_bucket{a="b",le="0.5"} 1',
        'took_bucket{a="b",le="1"} 4',
        'took_bucket{a="b",le="+Inf"} 6',
    ]


def test_a_series_goes_with_the_last_version_that_has_it(metrics: CustomMetrics) -> None:
    metrics.apply("old", changes_of(counted(2), counted(1, {"only": "old"})))
    metrics.apply("new", changes_of(counted(1)))
    metrics.forget("old")
    assert text(metrics).splitlines()[2:] == ["seen 3.0"]
    metrics.forget("new")
    assert text(metrics) == ""


def test_a_name_has_one_kind_and_one_set_of_buckets(metrics: CustomMetrics, caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("test")
    first = OwnedMetrics(metrics, "model 'a'", log)
    second = OwnedMetrics(metrics, "model 'b'", log)
    first.apply(changes_of(counted(1)))
    for _ in range(2):
        second.apply(changes_of(MetricChange("seen", MetricKind.GAUGE, "", {}, 9, True), counted(1, {"kind": "x"})))
    assert text(metrics).splitlines()[1:] == ["# TYPE seen counter", "seen 1.0", 'seen{kind="x"} 2.0']
    (record,) = caplog.records
    assert record.getMessage() == (
        "model 'b': metric 'seen' is ignored: another model defines it with another kind or other buckets"
    )


def test_what_is_left_out_takes_no_place(metrics: CustomMetrics) -> None:
    metrics.apply("a", changes_of(counted(1)))
    for number in range(3):
        labels = {"number": str(number)}
        histogram = MetricChange("seen", MetricKind.HISTOGRAM, "", labels, 2.0, False, (0.5,), (1, 0))
        assert list(metrics.apply("b", changes_of(histogram))) == ["seen"]
        assert metrics.apply("a", changes_of(counted(1, labels))) == {}
    assert text(metrics).splitlines()[2:] == ["seen 1.0", *(f'seen{{number="{number}"}} 1.0' for number in range(3))]


def test_who_has_left_tells_nothing_more(metrics: CustomMetrics) -> None:
    owned = OwnedMetrics(metrics, "model 'a'", logging.getLogger("test"))
    owned.apply(changes_of(counted(1)))
    owned.forget()
    owned.apply(changes_of(counted(1)))
    assert text(metrics) == ""


def test_changes_travel_as_a_message() -> None:
    changes = changes_of(
        counted(1.5, {"a": "ü"}),
        MetricChange("took", MetricKind.HISTOGRAM, "", {}, 2.0, False, (0.5,), (1, 0)),
        MetricChange("level", MetricKind.GAUGE, "", {}, 3.0, True),
    )
    assert decode_message(encode_message(changes)) == changes
