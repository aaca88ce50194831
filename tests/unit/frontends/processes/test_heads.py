"""Heads of requests and answers, which both ends of a link remember by numbers, but not for ever."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from support.front_link import Client, Ends
from support.waiting import PATIENCE_SECONDS, wait_until

from rocserve.core.errors import StatusCode
from rocserve.core.parameters import ParameterValue
from rocserve.core.requests import InferRequest, InputHead, RequestHead
from rocserve.core.responses import LARGE_RESPONSE
from rocserve.frontends.processes import answers, front_end
from rocserve.plane.heap import COPIED_AT_ONCE, HeapFull

REMEMBERED = 16
FEW = np.arange(3, dtype=np.int32)
COPIED_IN_STEPS = np.arange(COPIED_AT_ONCE // 2, dtype=np.int32)
LONG = "x" * (33 << 10)
"""A head with this parameter is used for one request, or for one answer, only."""


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    for module in (front_end, answers):
        monkeypatch.setattr(module, "REMEMBERED", REMEMBERED)
    ends = Ends()
    yield ends
    ends.close()


def head_of(model: str, array: np.ndarray, **parameters: ParameterValue) -> RequestHead:
    return RequestHead(model, "", (InputHead("I", "INT32", array.shape, {}),), (), parameters)


def ask(ends: Ends, head: RequestHead, array: np.ndarray, request_id: str = "") -> Client:
    return ends.ask(InferRequest(head, request_id, [memoryview(array.tobytes())]))


def check_echoed(client: Client, array: np.ndarray) -> None:
    assert client.ended.wait(PATIENCE_SECONDS), client.errors
    (response,) = client.responses
    assert (response.outputs[0].numpy() == array).all()


@pytest.mark.parametrize("array", [FEW, COPIED_IN_STEPS], ids=["few bytes", "inputs copied in steps"])
@pytest.mark.parametrize("parameter", ["y", LONG], ids=["small head", "large head"])
def test_requests_of_ever_new_heads_push_out_no_head_that_is_still_used(
    ends: Ends, array: np.ndarray, parameter: str
) -> None:
    """The heads that only one request uses are not remembered at all."""
    used = head_of("echo", FEW)
    check_echoed(ask(ends, used, FEW), FEW)
    for number in range(4 * REMEMBERED):
        check_echoed(ask(ends, head_of("echo", array, number=number, long=parameter), array), array)
        check_echoed(ask(ends, used, FEW), FEW)
    assert not ends.reasons

    def heads_left() -> int:
        gc.collect()
        heads = [one for one in gc.get_objects() if isinstance(one, RequestHead)]
        # Other tests of this process have heads with long parameters too, for other models.
        return sum(head.model_name == "echo" and "long" in head.parameters for head in heads)

    if parameter == LONG:
        # The loops' threads may be just letting the last ones go.
        wait_until(lambda: heads_left() <= 1)


def test_requests_that_find_no_memory_push_out_no_head(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    used = head_of("echo", FEW)
    check_echoed(ask(ends, used, FEW), FEW)
    place = ends.remote.end.place_in_turn

    def place_some(pieces: tuple[bytes, ...], nbytes: int) -> int:
        if any(b"without room" in piece for piece in pieces):
            raise HeapFull(nbytes, nbytes)
        return place(pieces, nbytes)

    monkeypatch.setattr(ends.remote.end, "place_in_turn", place_some)
    for number in range(3 * REMEMBERED):
        refused = ask(ends, head_of("echo", FEW, number=number, long=LONG, text="without room"), FEW)
        assert refused.ended.wait(PATIENCE_SECONDS)
        assert [error.code for error in refused.errors] == [StatusCode.RESOURCE_EXHAUSTED]
    check_echoed(ask(ends, used, FEW), FEW)
    check_echoed(ask(ends, head_of("echo", FEW, long=LONG), FEW, "with room"), FEW)
    assert not ends.reasons


@pytest.mark.parametrize("parameter", ["y", LONG], ids=["small head", "large head"])
def test_heads_are_forgotten_while_a_large_answer_is_copied(ends: Ends, pause: threading.Event, parameter: str) -> None:
    large = ask(ends, head_of("grow", FEW, long=parameter), FEW)
    for number in range(4 * REMEMBERED):
        check_echoed(ask(ends, head_of("echo", FEW, number=number, long=parameter), FEW), FEW)
    assert not large.ended.is_set()
    pause.set()
    check_echoed(large, np.zeros(LARGE_RESPONSE // 4, np.int32))
    assert large.responses[0].parameters == {"long": parameter}


def test_the_numbers_of_old_heads_are_used_again(ends: Ends) -> None:
    """A server that gets a new parameter with each request keeps no more memory for it."""
    heads = [head_of("echo", FEW, number=number) for number in range(3 * REMEMBERED)]
    for head in (*heads, *heads):
        client = ask(ends, head, FEW)
        check_echoed(client, FEW)
        assert client.responses[0].parameters == head.parameters
    assert len(ends.link._heads) == len(ends.remote._answer_heads) == REMEMBERED
