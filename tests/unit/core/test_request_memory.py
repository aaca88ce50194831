"""The memory of requests: refusals at the limit, and nothing given back twice."""

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
)


def test_the_limit_is_a_quarter_of_the_memory_up_to_a_bound() -> None:
    assert default_limit(4 << 30) == 1 << 30
    assert default_limit(1 << 40) == LARGEST_DEFAULT_BYTES
    assert default_limit(None) == LARGEST_DEFAULT_BYTES


def test_what_does_not_fit_is_refused_at_once_and_leaves_no_trace() -> None:
    memory = RequestMemory(100)
    first, second = Holding(), Holding()
    memory.admit(first, 80)
    with pytest.raises(MemoryFull) as refused:
        memory.admit(second, 21)
    assert refused.value.code is StatusCode.RESOURCE_EXHAUSTED
    assert refused.value.text == (
        "the server's memory for requests is full: 80 B of 100 B (--max-request-memory) are in use by requests and"
        " answers, and this request needs 21 B; send fewer or smaller requests at once, and try again later"
    )
    assert (memory.request_bytes, memory.refused_requests, second.held_bytes) == (80, 1, 0)
    memory.admit(second, 20)
    memory.release(first)
    memory.release(first)
    assert memory.request_bytes == 20


def test_a_request_that_can_never_fit_is_told_so() -> None:
    memory = RequestMemory(100)
    holder = Holding()
    memory.admit(holder, 60)
    with pytest.raises(MemoryFull, match="this request takes 120 B of memory, more than the 100 B") as refused:
        memory.admit(holder, 60)
    assert refused.value.fits_never


def test_requests_that_never_come_whole_leave_room_for_those_that_do() -> None:
    memory = RequestMemory(100)
    first, second, whole = Holding(), Holding(), Holding()
    memory.admit_part(first, 30)
    memory.admit_part(second, 20)
    with pytest.raises(MemoryFull, match=r"may take 50 B together, half .* and 31 B have come of this one") as refused:
        memory.admit_part(first, 1)
    assert not refused.value.fits_never
    assert (memory.request_bytes, memory.unfinished_bytes, first.held_bytes) == (50, 50, 30)
    memory.admit(whole, 50)
    memory.release_part(second)
    memory.admit(whole, 10)
    with pytest.raises(MemoryFull, match="90 B of 100 B"):
        memory.admit_part(second, 11)
    memory.release_part(first, 10)
    memory.release_part(first)
    memory.release(whole)
    with pytest.raises(MemoryFull) as refused:
        memory.admit_part(first, 51)
    assert refused.value.fits_never
    assert (memory.request_bytes, memory.unfinished_bytes) == (0, 0)


def test_requests_that_fill_the_memory_keep_no_answer_back() -> None:
    memory = RequestMemory(100)
    request, answer = Holding(), Holding()
    memory.admit(request, 100)
    memory.admit_answer(answer, 100)
    with pytest.raises(MemoryFull, match="not read yet or within ensembles, and this answer needs 1 B"):
        memory.admit_answer(Holding(), 1)
    memory.release(request)
    with pytest.raises(MemoryFull):
        memory.admit(request, 1)
    memory.release_answer(answer, 30)
    memory.admit(request, 30)
    memory.release_answer(answer, 1000)
    assert (memory.request_bytes, memory.answer_bytes) == (30, 0)


def test_threads_that_end_the_same_requests_leave_nothing_behind() -> None:
    memory = RequestMemory(10_000)
    holders = [Holding() for _ in range(50)]

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(3000):
            holder, kind = chance.choice(holders), chance.random()
            try:
                if kind < 0.5:
                    memory.admit(holder, chance.randrange(500))
                else:
                    memory.release(holder)
            except MemoryFull:
                memory.release(holder)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert memory.request_bytes == sum(holder.held_bytes for holder in holders)
    for holder in holders:
        memory.release(holder)
    assert memory.request_bytes == 0


def test_what_lies_between_steps_has_half_of_the_memory_for_answers() -> None:
    memory = RequestMemory(100)
    step, answer = Holding(), Holding()
    memory.admit_step(step, 50)
    with pytest.raises(MemoryFull, match=r"between the steps of ensembles may take 50 B together, .* and 1 B more are"):
        memory.admit_step(Holding(), 1)
    # An answer that came of it has room, and a step that makes less than it read.
    memory.admit_answer(answer, 50)
    memory.admit_step(step, -20)
    assert (memory.step_bytes, memory.answer_bytes, step.held_bytes) == (30, 80, 30)
    memory.admit_answer(answer, 20)
    with pytest.raises(MemoryFull, match="within ensembles, and this answer needs 1 B"):
        memory.admit_step(step, 1)
    memory.release_step(step)
    memory.release_step(step)
    memory.release_answer(answer)
    assert (memory.step_bytes, memory.answer_bytes, memory.refused_answers) == (0, 0, 2)


def test_what_front_ends_use_leaves_less_for_others_and_counts_in_all() -> None:
    memory, holder = RequestMemory(100), Holding()
    memory.admit(holder, 10)
    memory.note_front_end("first", MemoryUse(40, 30, refused_requests=2))
    memory.note_front_end("second", MemoryUse(5, 5, refused_answers=1))
    assert memory.used_bytes == 90
    assert memory.use() == MemoryUse(55, 35, 2, 1)
    with pytest.raises(MemoryFull):
        memory.admit(holder, 11)
    memory.note_front_end("first", MemoryUse(0, 0, refused_requests=3))
    memory.admit(holder, 11)
    assert memory.use() == MemoryUse(26, 5, 4, 1)


def test_what_ended_front_ends_have_refused_stays_counted() -> None:
    memory = RequestMemory(100)
    memory.note_front_end("first", MemoryUse(40, 30, 2, 1))
    memory.forget_front_end("first")
    memory.forget_front_end("unknown")
    memory.note_front_end("next", MemoryUse(1, 0, 1, 0))
    assert memory.use() == MemoryUse(1, 0, 3, 1)
    assert memory.used_bytes == 1


def test_a_share_says_that_it_is_one() -> None:
    memory = RequestMemory(100, shares=4)
    assert memory.limit_bytes == 25
    with pytest.raises(MemoryFull, match=r"--max-request-memory, shared by 4 front ends"):
        memory.admit(Holding(), 26)
