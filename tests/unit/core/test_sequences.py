from functools import partial

import pytest

from rocserve.core.requests import InferRequest, RequestHead
from rocserve.core.sequences import SequenceId, SequenceOrder, SequenceTag


def request_of(name: str, sequence: SequenceId | None = 1, model: str = "m") -> InferRequest:
    tag = None if sequence is None else SequenceTag(sequence)
    return InferRequest(RequestHead(model, "", (), (), {}), name, (), sequence=tag)


class Desk:
    """Begins requests in their order, and delays those that are marked as large."""

    def __init__(self) -> None:
        self.order = SequenceOrder()
        self.begun: list[str] = []

    def begin(self, request: InferRequest) -> None:
        if self.order.wait_if_held(request.sequence_key, partial(self.begin, request)):
            return
        self.begun.append(request.id)
        if "large" in request.id:
            self.order.hold(request.sequence_key)


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_requests_wait_for_the_one_that_is_held_before_them(desk: Desk) -> None:
    first, again = request_of("large"), request_of("large again")
    for request in (first, request_of("a"), again, request_of("b"), request_of("c")):
        desk.begin(request)
    assert desk.begun == ["large"]
    desk.order.release(first.sequence_key)
    assert desk.begun == ["large", "a", "large again"]
    desk.begin(request_of("d"))
    desk.order.release(again.sequence_key)
    assert desk.begun == ["large", "a", "large again", "b", "c", "d"]
    assert not desk.order.held


@pytest.mark.parametrize(
    "other", [request_of("o", 2), request_of("o", "1"), request_of("o", 1, "n"), request_of("o", None)]
)
def test_others_do_not_wait(desk: Desk, other: InferRequest) -> None:
    desk.begin(request_of("large"))
    desk.begin(other)
    assert desk.begun == ["large", "o"]


def test_requests_without_a_sequence_hold_up_nobody(desk: Desk) -> None:
    for request in (request_of("large", None), request_of("next", None)):
        desk.begin(request)
        desk.order.release(request.sequence_key)
    assert desk.begun == ["large", "next"]
    assert not desk.order.held
