"""The rule by which front ends come and go."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from rocserve.frontends.demand import Demand, Pace

PACE = Pace(busy_share=0.6, busy_seconds=2.0, quiet_share=0.3, quiet_seconds=10.0, sample_seconds=0.5)


class Samples:
    """Takes a sample each half second."""

    def __init__(self) -> None:
        self.demand = Demand(PACE)
        self._half_seconds = 0
        self._worked = 0.0
        self.demand.note(0.0, 0.0, 0)

    def take(self, *shares: float, in_flight: int = 2) -> list[bool]:
        """Whether each sample has changed the demand."""
        changes = []
        for share in shares:
            self._half_seconds += 1
            self._worked += share / 2
            changes.append(self.demand.note(self._half_seconds / 2, self._worked, in_flight))
        return changes

    def bring(self) -> None:
        """Let front ends come. The next sample begins the next interval, because their start took time."""
        assert self.take(*times(5, 1.0))[3:] == [True, False]


@pytest.fixture
def samples() -> Samples:
    return Samples()


def times(count: int, share: float) -> Iterable[float]:
    return [share] * count


def test_front_ends_come_after_two_busy_seconds(samples: Samples) -> None:
    assert samples.take(*times(4, 0.7)) == [False, False, False, True]
    assert samples.demand.has_front_ends


def test_a_burst_brings_none(samples: Samples) -> None:
    for _ in range(9):
        assert not any(samples.take(*times(3, 1.0), *times(2, 0.5), *times(10, 0.1)))


def test_many_bursts_bring_them(samples: Samples) -> None:
    burst = (*times(3, 1.0), *times(4, 0.1))
    assert not any(samples.take(*burst))
    assert samples.take(*burst) == [False, True, *times(5, False)]


def test_they_go_after_a_long_quiet_time_of_all(samples: Samples) -> None:
    samples.bring()
    assert not any(samples.take(*times(19, 0.2)))
    assert samples.take(0.2) == [True]
    assert not samples.demand.has_front_ends


def test_a_moment_of_load_begins_the_quiet_time_anew(samples: Samples) -> None:
    samples.bring()
    assert not any(samples.take(*times(18, 0.0), 0.4, *times(19, 0.0)))
    assert samples.take(0.0) == [True]


def test_a_load_between_the_two_limits_changes_nothing(samples: Samples) -> None:
    assert not any(samples.take(*times(100, 0.5)))
    samples.bring()
    assert not any(samples.take(*times(100, 0.5)))


def test_work_of_a_process_that_has_ended_is_gone(samples: Samples) -> None:
    samples.bring()
    assert samples.take(-5.0, 0.5) == [False, False]


def test_what_could_not_be_done_is_asked_for_again(samples: Samples) -> None:
    samples.bring()
    samples.demand.forget(has_front_ends=False)
    assert samples.take(*times(5, 1.0)) == [False, False, False, False, True]


def test_one_request_at_a_time_needs_none(samples: Samples) -> None:
    assert not any(samples.take(*times(100, 0.9), in_flight=1))
    samples.bring()
    assert not any(samples.take(*times(19, 0.9), in_flight=1))
    assert samples.take(0.9, in_flight=1) == [True]
