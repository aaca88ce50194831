"""Results as a worker sends them: cut into requests, refused if they are invalid."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given

from rocserve.core.datatypes import DataType
from rocserve.core.plain import to_json
from rocserve.core.tensors import TensorHead
from rocserve.links.entries import ENTRY, FAILURE, OPEN, RESPONSE, RESULTS_HEADER, WHOLE
from rocserve.plane.heap import Heap, HeapReader
from rocserve.workers.results import BatchOutcome, ResultReader

HEAD = TensorHead("X", DataType.INT32, (4, 2))
STRINGS = TensorHead("S", DataType.BYTES, (4,))
SLOT_BYTES = 4096


class Sent:
    """A slot of results in a worker's heap, and the server's reader of it."""

    def __init__(self) -> None:
        self.heap = Heap("test", 1 << 20)
        self.reader = ResultReader(HeapReader(self.heap.open_for_reading()))
        self.place = self.heap.allocate(SLOT_BYTES)[0]
        self.memory = self.heap.view(self.place, SLOT_BYTES)
        self.memory[:] = bytes(range(256)) * (SLOT_BYTES // 256)

    def layout(self, number: int, *heads: TensorHead) -> None:
        text = to_json(heads)
        place = self.heap.allocate(len(text))[0]
        self.heap.view(place, len(text))[:] = text
        self.reader.layouts.define(number, place, len(text))

    def read(
        self, *entries: tuple[int, ...], sizes: tuple[int, ...] = (4,), nbytes: int = SLOT_BYTES, may_open: bool = False
    ) -> BatchOutcome:
        """The outcome of results by kind (with the flag WHOLE), code, layout, requests, start and details."""
        RESULTS_HEADER.pack_into(self.memory, 0, len(entries), 0, 0, 0)
        for index, (kind, *fields) in enumerate(entries, 1):
            ENTRY.pack_into(self.memory, index * ENTRY.size, kind % WHOLE, kind & WHOLE, *fields)
        return self.reader.read_batch(self.place, nbytes, sizes, may_open)


@pytest.fixture
def sent() -> Iterator[Sent]:
    sent = Sent()
    yield sent
    sent.heap.close()


SENT = Sent()
"""Shared by the many examples of a property."""


def together(requests: int = 1, start: int = 64, number: int = 0) -> tuple[int, ...]:
    return (RESPONSE | WHOLE, 0, number, requests, start, 0)


def of(requests: int, start: int = 64, number: int = 0, details: int = 0) -> tuple[int, ...]:
    return (RESPONSE, 0, number, requests, start, details)


def slices(outcome: BatchOutcome, count: int) -> list[list[tuple[object, ...]]]:
    """By request, each output's head and its bytes."""
    found = [outcome.outputs_of(index) for index in range(count)]
    return [[(*head, bytes(data)) for head, data in zip(*one, strict=True)] for one in found]


def pattern(begin: int, end: int) -> bytes:
    return bytes(position % 256 for position in range(begin, end))


def test_outputs_are_cut_by_rows(sent: Sent) -> None:
    sent.layout(0, HEAD, HEAD._replace(name="Y"))
    for start in (64, 64, 1024):
        assert slices(sent.read(together(2, start), sizes=(1, 3)), 2) == [
            [
                ("X", DataType.INT32, (1, 2), pattern(start, start + 8)),
                ("Y", DataType.INT32, (1, 2), pattern(start + 64, start + 72)),
            ],
            [
                ("X", DataType.INT32, (3, 2), pattern(start + 8, start + 32)),
                ("Y", DataType.INT32, (3, 2), pattern(start + 72, start + 96)),
            ],
        ]


def test_the_same_result_cut_otherwise_for_other_requests(sent: Sent) -> None:
    sent.layout(0, HEAD)
    for sizes in ((4,), (2, 2), (1, 3), (4,)):
        parts = slices(sent.read(together(len(sizes)), sizes=sizes), len(sizes))
        assert [part[0][2] for part in parts] == [(size, 2) for size in sizes]


def test_results_of_each_request(sent: Sent) -> None:
    sent.layout(0, HEAD)
    sent.layout(1, STRINGS, HEAD)
    sent.memory[1024:1040] = struct.pack("<QQ", 20, 32)
    sent.memory[1216:1224] = b'{"k": 1}'
    outcome = sent.read(of(2, 128), of(1, 1024, 1, 8), (FAILURE, 3, 0, 1, 2048, 4), sizes=(1, 2, 3, 4))
    assert slices(outcome, 3) == [
        [("X", DataType.INT32, (4, 2), pattern(128, 160))],
        [("X", DataType.INT32, (4, 2), pattern(192, 224))],
        [("S", DataType.BYTES, (4,), pattern(1088, 1108)), ("X", DataType.INT32, (4, 2), pattern(1152, 1184))],
    ]
    assert outcome.parameters == {2: {"k": 1}} and [*outcome.failures] == [3]


@pytest.mark.parametrize(
    ("head", "sizes"),
    [
        (HEAD, (3, 2)),
        (TensorHead("X", DataType.INT32, ()), (2, 2)),
        # The worker cuts them, because their bytes do not follow from their rows.
        (STRINGS, (2, 2)),
    ],
)
def test_outputs_that_do_not_fit_the_batch(sent: Sent, head: TensorHead, sizes: tuple[int, ...]) -> None:
    sent.layout(0, head)
    sent.memory[64:72] = struct.pack("<Q", 16)
    with pytest.raises(ValueError, match=r"output .* has the shape"):
        sent.read(together(2), sizes=sizes)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (together(1, 1 << 62), "a result of 64 bytes at byte"),
        (together(1, 4090), "a result of 64 bytes at byte 4090 of 4096"),
        (of(1, 1 << 62, 1), "the sizes of 1 tensors in 0 bytes"),
        (of(1, 4090, 1), "the sizes of 1 tensors in 6 bytes"),
        (of(1, 64, 0, 1 << 40), "a result of 1099511627840 bytes"),
        (of(1, 64, 0, 3), "decode"),
        (together(1, 64, 9), "tensors of the undefined layout 9"),
        (of(0), "results of more than 1 requests"),
        (of(2), "results of more than 1 requests"),
        ((OPEN, 0, 0, 1, 0, 0), f"a message of kind {OPEN} among the results of 1 requests"),
        ((0, 0, 0, 1, 64, 0), "a message of kind 0 among the results of 1 requests"),
        ((FAILURE, 3, 0, 1, 4090, 10), "a text of 10 bytes at byte 4090 of 4096"),
        ((FAILURE, 3, 0, 1, 64, 1 << 40), "a text of 1099511627776 bytes"),
        ((FAILURE | WHOLE, 3, 0, 1, 4090, 10), "a text of 10 bytes at byte 4090 of 4096"),
    ],
)
def test_results_that_make_no_sense(sent: Sent, entry: tuple[int, ...], reason: str) -> None:
    sent.layout(0, HEAD)
    sent.layout(1, STRINGS)
    # It has also been read where it is valid.
    sent.read(together())
    with pytest.raises(ValueError, match=reason):
        sent.read(entry)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([RESPONSE, RESPONSE | WHOLE, FAILURE, FAILURE | WHOLE, OPEN]),
            st.integers(0, 20),
            st.integers(0, 3),
            st.integers(0, 4),
            st.integers(0, SLOT_BYTES),
            st.integers(0, 64),
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 3),
)
def test_whatever_is_accepted_lies_within_its_slot(entries: Sequence[tuple[int, ...]], requests: int) -> None:
    for number, heads in enumerate([(HEAD,), (STRINGS, HEAD), (HEAD, STRINGS)]):
        SENT.layout(number, *heads)
    try:
        outcome = SENT.read(*entries, sizes=(4 // requests,) * requests, may_open=True)
    except ValueError:
        return
    if outcome.error is not None:
        return
    assert len(outcome.parts) == requests
    for index in range(requests):
        for head, data in zip(*outcome.outputs_of(index), strict=True):
            assert head.datatype is DataType.BYTES or len(data) == 4 * head.shape[0] * head.shape[1]


def test_what_is_remembered_is_bounded(sent: Sent) -> None:
    for number in range(600):
        sent.layout(number, HEAD)
        for sizes in ((2, 2), (1, 3), (3, 1), (1, 1, 2), (1, 1, 1, 1), (2, 1, 1)):
            sent.read(together(len(sizes), number=number), sizes=sizes)
            assert sent.reader._remembered <= 8192
    assert len(sent.reader._cuts) <= 8192


def test_a_layout_that_comes_again_with_another_meaning(sent: Sent) -> None:
    """Numbers are not used again; if a worker does, its latest layout counts."""
    sent.layout(1, HEAD)
    sent.read(together(2, number=1), sizes=(2, 2))
    sent.layout(1, TensorHead("Y", DataType.UINT8, (4, 8)))
    (_, second) = slices(sent.read(together(2, number=1), sizes=(2, 2)), 2)
    assert second == [("Y", DataType.UINT8, (2, 8), pattern(80, 96))]


@pytest.mark.parametrize(("count", "nbytes"), [(3, 64 + 3 * 64 - 1), (4, 1024), (2, 1024)])
def test_results_that_are_alike_fit_the_batch_and_its_memory(sent: Sent, count: int, nbytes: int) -> None:
    sent.layout(0, HEAD)
    with pytest.raises(ValueError, match="result"):
        sent.read(of(count), sizes=(4,) * 3, nbytes=nbytes)


def test_results_outside_of_their_heap_or_in_no_entries(sent: Sent) -> None:
    for place, nbytes, entries, reason in (
        (1 << 62, 64, 1, "lies outside of its heap"),
        (sent.place, 64, 0, "results in 0 entries of 64 bytes"),
        (sent.place, 64, 2, "results in 2 entries of 64 bytes"),
        (sent.place, 0, 1, "results in 1 entries of 0 bytes"),
        (sent.place, 64, 1 << 40, "results in 1099511627776 entries of 64 bytes"),
    ):
        RESULTS_HEADER.pack_into(sent.memory, 0, entries, 0, 0, 0)
        with pytest.raises(ValueError, match=reason):
            sent.reader.read_batch(place, nbytes, (1,), False)


@pytest.mark.parametrize("kind", [RESPONSE | WHOLE, FAILURE | WHOLE, FAILURE])
def test_results_for_another_number_of_requests_than_their_kind_has(sent: Sent, kind: int) -> None:
    sent.layout(0, HEAD)
    with pytest.raises(ValueError, match=f"a message of kind {kind % WHOLE} among the results of 3 requests"):
        sent.read((kind, 3, 0, 2, 64, 0), sizes=(4, 4, 4))
