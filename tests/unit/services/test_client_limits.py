from __future__ import annotations

from typing import Any

import pytest

from rocserve.core.errors import ServeError, StatusCode, internal
from rocserve.core.requests import Answer, InferResponse
from rocserve.services import client_limits
from rocserve.services.client_limits import ClientLimits


class Answers:
    """A responder that remembers nothing."""

    def expect_many(self) -> None: ...
    def send(self, answer: object, final: bool = True) -> None: ...
    def watch_cancellation(self, callback: object) -> None: ...


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def refusal(limits: ClientLimits, address: str) -> str:
    with pytest.raises(ServeError) as raised:
        limits.admit(address, Answers())
    assert raised.value.code is StatusCode.RESOURCE_EXHAUSTED
    return raised.value.text


@pytest.mark.parametrize("last", [InferResponse.of("m", "1", "", ()), None, internal("x")])
def test_a_client_has_so_many_requests_in_flight_however_they_end(last: Answer) -> None:
    limits = ClientLimits(2, 0)
    first: Any = limits.admit("10.0.0.1", Answers())
    limits.admit("10.0.0.1", Answers())
    assert refusal(limits, "10.0.0.1") == (
        "the client 10.0.0.1 has 2 requests in flight, as many as one client may have (--max-requests-per-client); wait"
        " for answers, and try again"
    )
    limits.admit("10.0.0.2", Answers())
    # Responses that others follow do not count; what comes after the last is not counted again.
    first.send(InferResponse.of("m", "1", "", ()), final=False)
    first.send(internal("one of several"), final=False)
    refusal(limits, "10.0.0.1")
    for _ in range(2):
        first.send(last)
    limits.admit("10.0.0.1", Answers())
    refusal(limits, "10.0.0.1")


def test_clients_are_forgotten_when_they_have_nothing_in_flight() -> None:
    limits = ClientLimits(2, 0)
    responders: list[Any] = [limits.admit(f"10.0.0.{number}", Answers()) for number in range(50)]
    assert len(limits) == 50
    for responder in responders:
        responder.send(None)
    assert len(limits) == 0


def test_a_client_sends_so_many_requests_a_second() -> None:
    clock = Clock()
    limits = ClientLimits(0, 10, clock)
    for _ in range(10):
        limits.admit("10.0.0.1", Answers()).send(None)
    assert "more than the 10 requests a second" in refusal(limits, "10.0.0.1")
    limits.admit("10.0.0.2", Answers())
    clock.now += 0.25
    for _ in range(2):
        limits.admit("10.0.0.1", Answers()).send(None)
    refusal(limits, "10.0.0.1")
    # No more than a second's worth is saved.
    clock.now += 3600
    for _ in range(10):
        limits.admit("10.0.0.1", Answers()).send(None)
    refusal(limits, "10.0.0.1")


def test_less_than_one_request_a_second() -> None:
    clock = Clock()
    limits = ClientLimits(0, 0.5, clock)
    limits.admit("10.0.0.1", Answers())
    clock.now += 1.9
    refusal(limits, "10.0.0.1")
    clock.now += 0.2
    limits.admit("10.0.0.1", Answers())


def test_the_table_of_clients_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_limits, "MOST_CLIENTS", 100)
    clock = Clock()
    limits = ClientLimits(0, 2, clock)
    for number in range(100):
        limits.admit(f"10.0.0.{number}", Answers()).send(None)
    # All others share what one client has.
    for number in range(2):
        limits.admit(f"10.0.1.{number}", Answers()).send(None)
    assert "the client others sends" in refusal(limits, "10.0.1.2")
    assert len(limits) == 101
    clock.now += 1.0
    limits.admit("10.0.1.3", Answers())
    assert len(limits) == 1


@pytest.mark.parametrize(
    ("one", "other", "are_one"),
    [
        ("10.0.0.1", "::ffff:10.0.0.1", True),
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::1", True),
        ("unix", "unix", True),
        ("10.0.0.1", "10.0.0.2", False),
    ],
)
def test_which_addresses_are_one_client(one: str, other: str, are_one: bool) -> None:
    limits = ClientLimits(1, 0)
    limits.admit(one, Answers())
    if are_one:
        refusal(limits, other)
    else:
        limits.admit(other, Answers())
