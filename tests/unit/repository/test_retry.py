from __future__ import annotations

import time

from rocserve.core.errors import internal
from rocserve.repository.lifecycle import Failure, RetryPolicy


def _pauses(policy: RetryPolicy, attempts: int, took_seconds: float = 0.0) -> float:
    """After this many failed tries."""
    failure = policy.next_failure(internal("bad"), "a", Failure(internal("bad"), "a", attempts - 1), took_seconds)
    assert failure.retry_at is not None
    return round(failure.retry_at - time.monotonic(), 1)


def test_pauses_double_up_to_the_longest() -> None:
    policy = RetryPolicy(1.0, 10.0)
    assert [_pauses(policy, attempts) for attempts in range(1, 7)] == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert _pauses(policy, 10_000) == 10.0


def test_what_took_long_is_not_tried_again_at_once() -> None:
    policy = RetryPolicy(1.0, 10.0)
    assert [_pauses(policy, 1, took) for took in (0.1, 5.0, 3600.0)] == [1.0, 5.0, 3600.0]
    failure = policy.next_failure(internal("bad"), "a", None, 3600.0)
    assert failure.text == "bad (failed once, next try in 3600 s)"


def test_a_disabled_policy_never_tries_again() -> None:
    policy = RetryPolicy(1.0, 10.0)
    for failure in (
        RetryPolicy(1.0, 10.0, enabled=False).next_failure(internal("bad"), "a"),
        policy.next_failure(internal("bad"), "a", can_pass=False),
    ):
        assert failure.retry_at is None
        assert failure.text == "bad"
        assert not failure.is_due()


def test_attempts_count_on_for_the_same_content_only() -> None:
    policy = RetryPolicy(100.0, 1000.0)
    first = policy.next_failure(internal("bad"), "a")
    second = policy.next_failure(internal("bad"), "a", first)
    other = policy.next_failure(internal("bad"), "b", second)
    assert [first.attempts, second.attempts, other.attempts] == [1, 2, 1]
    assert first.text == "bad (failed once, next try in 100 s)"
    assert second.text == "bad (failed 2 times, next try in 200 s)"
    assert second.retry_at is not None
    assert second.retry_at > time.monotonic() + 150
