"""The memory of requests: refusals at the limit, and single releases."""

from __future__ import annotations

import random
import threading

import pytest

from rocserve.core.errors import StatusCode
from rocserve.core.request_memory import (
    LARGEST_DEFAULT_BYTES,
    Holding,
    MemoryFull,
    MemoryUse,
    RequestMemory,
    default_limit,
    table_bytes,
)


def test_the_limit_is_a_quarter_of_the_memory_up_to_a_bound() -> None:
    assert default_limit(4 << 30) == 1 << 30
    assert default_limit(1 << 40) == LARGEST_DEFAULT_BYTES
    assert default_limit(None) == LARGEST_DEFAULT_BYTES


def test_what_does_not_fit_is_refused_at_once_and_leaves_no_trace() -> None:
    memory = RequestMemory(100)
    first, second = Holding(), Holding()
    memory.requests.admit(first, 80)
    with pytest.raises(MemoryFull) as refused:
        memory.requests.admit(second, 21)
    assert refused.value.code is StatusCode.RESOURCE_EXHAUSTED
    assert refused.value.text == (
        "the server's memory for requests is full: 80 B of 100 B (--max-request-memory) are in use by requests and"
        " answers, and this request needs 21 B; send fewer or smaller requests at once, and try again later"
    )
    assert (memory.requests.own_bytes, memory.use().refused_requests, second.held_bytes) == (80, 1, 0)
    memory.requests.admit(second, 20)
    memory.requests.release(first)
    memory.requests.release(first)
    assert memory.requests.own_bytes == 20


def test_the_error_of_a_request_that_never_fits_has_both_sizes() -> None:
    memory = RequestMemory(100)
    holder = Holding()
    memory.requests.admit(holder, 60)
    with pytest.raises(MemoryFull, match="this request takes 120 B of memory, more than the 100 B") as refused:
        memory.requests.admit(holder, 60)
    assert refused.value.fits_never


def test_requests_that_never_come_whole_leave_room_for_those_that_do() -> None:
    memory = RequestMemory(100)
    first, second, whole = Holding(), Holding(), Holding()
    memory.unfinished.admit(first, 30)
    memory.unfinished.admit(second, 20)
    with pytest.raises(MemoryFull, match=r"may take 50 B together, half .* and this one already has 31 B") as refused:
        memory.unfinished.admit(first, 1)
    assert not refused.value.fits_never
    assert (memory.requests.own_bytes, memory.use().unfinished_bytes, first.held_bytes) == (50, 50, 30)
    memory.requests.admit(whole, 50)
    memory.unfinished.release(second)
    memory.requests.admit(whole, 10)
    with pytest.raises(MemoryFull, match="90 B of 100 B"):
        memory.unfinished.admit(second, 11)
    memory.unfinished.release(first, 10)
    memory.unfinished.release(first)
    memory.requests.release(whole)
    with pytest.raises(MemoryFull) as refused:
        memory.unfinished.admit(first, 51)
    assert refused.value.fits_never
    assert (memory.requests.own_bytes, memory.use().unfinished_bytes) == (0, 0)


def test_requests_that_fill_the_memory_keep_no_answer_back() -> None:
    memory = RequestMemory(100)
    request, answer = Holding(), Holding()
    memory.requests.admit(request, 100)
    memory.answers.admit(answer, 100)
    with pytest.raises(
        MemoryFull, match="in use by unread answers and tensors within ensembles, and this answer needs 1 B"
    ):
        memory.answers.admit(Holding(), 1)
    memory.requests.release(request)
    with pytest.raises(MemoryFull):
        memory.requests.admit(request, 1)
    memory.answers.release(answer, 30)
    memory.requests.admit(request, 30)
    memory.answers.release(answer, 1000)
    assert (memory.requests.own_bytes, memory.answers.own_bytes) == (30, 0)


def test_an_answer_takes_the_place_of_its_request() -> None:
    memory = RequestMemory(100)
    first, second = Holding(), Holding()
    memory.requests.admit(first, 60)
    memory.requests.admit(second, 40)
    memory.answers.take_over(first, 70, memory.requests)
    assert (memory.requests.own_bytes, memory.answers.own_bytes, first.held_bytes) == (40, 70, 70)
    with pytest.raises(MemoryFull, match="and this answer needs 31 B"):
        memory.answers.take_over(second, 31, memory.requests)
    assert (memory.requests.own_bytes, memory.answers.own_bytes, second.held_bytes) == (0, 70, 0)
    memory.answers.release(first)
    assert (memory.answers.own_bytes, memory.use().refused_answers) == (0, 1)


def test_threads_that_end_the_same_requests_leave_nothing_behind() -> None:
    memory = RequestMemory(10_000)
    holders = [Holding() for _ in range(50)]

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(3000):
            holder, kind = chance.choice(holders), chance.random()
            try:
                if kind < 0.5:
                    memory.requests.admit(holder, chance.randrange(500))
                else:
                    memory.requests.release(holder)
            except MemoryFull:
                memory.requests.release(holder)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert memory.requests.own_bytes == sum(holder.held_bytes for holder in holders)
    for holder in holders:
        memory.requests.release(holder)
    assert memory.requests.own_bytes == 0


def test_what_lies_between_steps_has_half_of_the_memory_for_answers() -> None:
    memory = RequestMemory(100)
    step, answer = Holding(), Holding()
    memory.steps.admit(step, 50)
    with pytest.raises(MemoryFull, match=r"between the steps of ensembles may take 50 B together, .* and 1 B more are"):
        memory.steps.admit(Holding(), 1)
    # An answer to the request has room, and what a step makes less than it read is free.
    memory.answers.admit(answer, 50)
    memory.steps.release(step, 20)
    assert (memory.use().step_bytes, memory.answers.own_bytes, step.held_bytes) == (30, 80, 30)
    memory.answers.admit(answer, 20)
    with pytest.raises(MemoryFull, match="within ensembles, and this answer needs 1 B"):
        memory.steps.admit(step, 1)
    memory.steps.release(step)
    memory.steps.release(step)
    memory.answers.release(answer)
    assert (memory.use().step_bytes, memory.answers.own_bytes, memory.use().refused_answers) == (0, 0, 2)


@pytest.fixture
def server_and_front_ends() -> tuple[RequestMemory, RequestMemory, RequestMemory]:
    """Three processes' memories, of 100 bytes together."""
    table = memoryview(bytearray(table_bytes(3)))
    server = RequestMemory(100)
    server.share(table, 0)
    front_ends = []
    for _ in range(2):
        front_ends.append(RequestMemory(100))
        front_ends[-1].share(table, server.add_front_end())
    return server, *front_ends


def test_front_ends_share_what_the_server_has_alone(
    server_and_front_ends: tuple[RequestMemory, RequestMemory, RequestMemory],
) -> None:
    assert [one.share_bytes for one in server_and_front_ends] == [100, 50, 50]
    assert RequestMemory(100).share_bytes == 100


def test_one_process_may_use_what_no_other_does(
    server_and_front_ends: tuple[RequestMemory, RequestMemory, RequestMemory],
) -> None:
    server, first, second = server_and_front_ends
    large, small, answer = Holding(), Holding(), Holding()
    first.requests.admit(large, 90)
    second.requests.admit(small, 10)
    for memory in (server, first, second):
        with pytest.raises(MemoryFull, match=r"full: 100 B of 100 B \(--max-request-memory\) are in use"):
            memory.requests.admit(Holding(), 1)
    first.requests.release(large)
    second.requests.admit(small, 80)
    second.answers.admit(answer, 100)
    with pytest.raises(MemoryFull):
        first.answers.admit(Holding(), 1)
    assert (first.requests.own_bytes, second.requests.own_bytes, second.answers.own_bytes) == (0, 90, 100)
    assert (server.used_bytes, server.use()) == (190, MemoryUse(90, 100, refused_requests=3, refused_answers=1))


def test_what_is_half_received_has_half_of_the_limit_in_all_processes_together(
    server_and_front_ends: tuple[RequestMemory, RequestMemory, RequestMemory],
) -> None:
    _, first, second = server_and_front_ends
    first.unfinished.admit(Holding(), 40)
    second.unfinished.admit(Holding(), 10)
    with pytest.raises(MemoryFull, match="incomplete requests may take 50 B together"):
        second.unfinished.admit(Holding(), 1)


def test_what_an_ended_front_end_has_refused_stays_counted_and_its_row_is_free(
    server_and_front_ends: tuple[RequestMemory, RequestMemory, RequestMemory],
) -> None:
    server, first, _ = server_and_front_ends
    first.requests.admit(Holding(), 60)
    with pytest.raises(MemoryFull):
        first.requests.admit(Holding(), 41)
    server.forget_front_end(2)
    assert server.use() == MemoryUse(refused_requests=1)
    assert server.add_front_end() == 2


def test_threads_of_several_processes_never_take_more_than_there_is(
    server_and_front_ends: tuple[RequestMemory, RequestMemory, RequestMemory],
) -> None:
    """Each checks the total taken, not only what was left."""
    taken, most = [0, 0, 0], []

    def work(index: int, memory: RequestMemory) -> None:
        chance, holder = random.Random(index), Holding()
        for _ in range(3000):
            try:
                memory.requests.admit(holder, chance.randrange(60))
            except MemoryFull:
                pass
            else:
                taken[index] = holder.held_bytes
                most.append(sum(taken))
                taken[index] = 0
            memory.requests.release(holder)

    threads = [threading.Thread(target=work, args=one) for one in enumerate(server_and_front_ends)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 50 < max(most) <= 100
    assert server_and_front_ends[0].used_bytes == 0
