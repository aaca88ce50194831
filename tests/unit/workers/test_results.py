"""What a worker tells of its results: cut into requests where it makes sense, refused where it does not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from rocserve.core.datatypes import DataType
from rocserve.core.plain import to_json
from rocserve.core.tensors import TensorHead
from rocserve.plane.heap import Heap, HeapReader
from rocserve.workers.entries import ENTRY, ONCE, REMEMBERED_LAYOUTS, RESULT, numbers
from rocserve.workers.messages import ResultLayout
from rocserve.workers.results import BatchOutcome, OutputCuts, Part, ResultReader

HEAD = TensorHead("X", DataType.INT32, (4, 2))
STRINGS = TensorHead("S", DataType.BYTES, (4,))


class Told:
    """A slot in a worker's heap, and the server's reader of it."""

    def __init__(self) -> None:
        self.heap = Heap("test", 1 << 20)
        reader = HeapReader(self.heap.open_for_reading())
        self.reader = ResultReader(reader)
        self.place = self.heap.allocate(4096)
        self.memory = self.heap.view(self.place, 4096)
        self.view = reader.checked(self.place, 4096)

    def put(self, of_result: Sequence[int], start: int = 0) -> int:
        """Numbers, and how many."""
        numbers(len(of_result)).pack_into(self.memory, start, *of_result)
        return len(of_result)

    def read(
        self,
        heads: Sequence[TensorHead],
        of_result: Sequence[int],
        sizes: tuple[int, ...],
        cuts: OutputCuts | None = None,
        flags: int = 0,
        start: int = 0,
    ) -> list[list[tuple[object, ...]]]:
        self.reader.define(flags, 0, to_json(ResultLayout(tuple(heads))))
        return flat(self.reader.read(self.view, 0, start, self.put(of_result, start), sizes, cuts)[1])


def flat(parts: Sequence[Part]) -> list[list[tuple[object, ...]]]:
    """By request, each output's head and where it lies."""
    return [[(*head, place.start, place.stop) for head, place in zip(*part, strict=True)] for part in parts]


@pytest.fixture
def told() -> Iterator[Told]:
    told = Told()
    yield told
    told.heap.close()


TOLD = Told()
"""For the many examples of a property."""


@pytest.mark.parametrize("flags", [0, ONCE])
def test_outputs_are_cut_by_rows_and_strings_where_they_say(told: Told, flags: int) -> None:
    for start in (0, 0, 1024):
        slices = told.read((HEAD, STRINGS), (128, 32, 192, 40, 0, 16, 40), (1, 3), None, flags, start)
        assert slices[0] == [("X", DataType.INT32, (1, 2), 128, 136), ("S", DataType.BYTES, (1,), 192, 208)]
        assert slices[1] == [("X", DataType.INT32, (3, 2), 136, 160), ("S", DataType.BYTES, (3,), 208, 232)]


def test_outputs_of_shapes_of_their_own(told: Told) -> None:
    cuts = {"X": [(2,), (3, 2)]}
    slices = told.read((HEAD,), (64, 32), (1, 1), cuts)
    assert slices == [[("X", DataType.INT32, (2,), 64, 72)], [("X", DataType.INT32, (3, 2), 72, 96)]]
    with pytest.raises(ValueError, match="output 'X' of 32 bytes is to be cut into 36"):
        told.read((HEAD,), (64, 32), (1, 1), {"X": [(3,), (3, 2)]})


def test_the_same_numbers_cut_otherwise_for_other_requests(told: Told) -> None:
    for sizes in ((4,), (2, 2), (1, 3), (4,)):
        slices = told.read((HEAD,), (64, 32), sizes)
        assert [part[0][2] for part in slices] == [(size, 2) for size in sizes]


@pytest.mark.parametrize(
    ("heads", "of_result", "sizes"),
    [
        ((HEAD,), (64, 32), (3, 2)),
        ((HEAD,), (64, 31), (4,)),
        ((HEAD,), (64, 31), (2, 2)),
        ((HEAD,), (64,), (4,)),
        ((TensorHead("X", DataType.INT32, (-4, -2)),), (64, 32), (4,)),
        ((TensorHead("X", DataType.INT32, ()),), (64, 4), (2, 2)),
        ((STRINGS,), (64, 32), (2, 2)),
        ((STRINGS,), (64, 32, 0, 40, 32), (2, 2)),
        ((STRINGS,), (64, 32, 1, 16, 32), (2, 2)),
        ((STRINGS,), (64, 32, 0, 16, 31), (2, 2)),
        ((STRINGS,), (64, 32, 0, 16), (2, 2)),
    ],
)
def test_outputs_that_do_not_fit_together(
    told: Told, heads: tuple[TensorHead, ...], of_result: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"output|numbers"):
        told.read(heads, of_result, sizes)


@pytest.mark.parametrize(
    ("heads", "of_result"),
    [
        # Two outputs on the same memory: a little memory would become a large response.
        ((TensorHead("a", DataType.UINT8, (1, 64)), TensorHead("b", DataType.UINT8, (1, 64))), (0, 64, 0, 64)),
        ((TensorHead("a", DataType.BYTES, (1, 1 << 40)),), (0, 64)),
        ((TensorHead("a", DataType.UINT8, (0, 1 << 64)),), (0, 0)),
    ],
)
def test_outputs_that_cannot_be_are_refused(
    told: Told, heads: tuple[TensorHead, ...], of_result: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"has \d+ bytes|outputs of 128 bytes in 64 bytes"):
        told.read(heads, of_result, (1,))


@pytest.mark.parametrize(
    ("start", "count", "reason"),
    [
        (1 << 62, 2, "a result with 2 numbers in"),
        (4090, 2, "a result with 2 numbers in 6 bytes"),
        (0, 1 << 50, f"a result with {1 << 50} numbers"),
        (0, (1 << 16) + 1, "a result with 65537 numbers"),
        (4032, 2, "a result of 96 bytes at byte 4032 of 4096"),
    ],
)
def test_results_that_lie_outside_of_their_slot(told: Told, start: int, count: int, reason: str) -> None:
    told.reader.define(0, 0, to_json(ResultLayout((HEAD,))))
    # It has been seen where it is good, too.
    told.reader.read(told.view, 0, 0, told.put((64, 32)), (4,))
    if start < 4080:
        told.put((64, 32), start)
    with pytest.raises(ValueError, match=reason):
        told.reader.read(told.view, 0, start, count, (4,))


def test_a_result_in_a_slot_of_its_own(told: Told) -> None:
    told.reader.define(0, 3, to_json(ResultLayout((HEAD,), parameters={"k": 1})))
    told.memory[64:96] = bytes(range(32))
    (heads, (data,)), layout = told.reader.read_at(told.place, 3, told.put((64, 32)))
    assert (heads, bytes(data), layout.parameters) == ((HEAD,), bytes(range(32)), {"k": 1})
    assert isinstance(data, memoryview) and data.readonly
    for of_result, reason in (
        ((64,), ""),
        ((1 << 40, 32), "lies outside of its heap"),
        ((1 << 18, 32), "was not written to its end"),
        ((64, 33), "has 33 bytes"),
    ):
        with pytest.raises(ValueError, match=reason):
            told.reader.read_at(told.place, 3, told.put(of_result))
    for place, count in ((1 << 62, 2), (told.place, 1 << 50)):
        with pytest.raises(ValueError, match=r"lies outside of its heap|a result with"):
            told.reader.read_at(place, 3, count)


@given(st.binary(min_size=1, max_size=300), st.integers(0, 1), st.integers(1, 3), st.integers(0, 2000))
def test_whatever_is_accepted_lies_within_its_slot(octets: bytes, which: int, requests: int, start: int) -> None:
    count = len(octets) // 2
    of_result = [int.from_bytes(octets[2 * index : 2 * index + 2]) % 64 for index in range(count)]
    heads = ((HEAD, STRINGS), (STRINGS, HEAD))[which]
    try:
        slices = TOLD.read(heads, of_result, (4 // requests,) * requests, start=start)
    except ValueError:
        return
    assert all(0 <= begin <= end <= 4096 - start for part in slices for *_, begin, end in part)


@given(st.binary(max_size=200))
@example(b"")
@example(b"{}")
@example(b"\xff\xff\xff\xff" + b"\x00" * 64)
@example(b'{"outputs":[["x","FP99",[1]]],"failures":[],"parameters":{}}')
@example(b'{"outputs":[["x","FP32"]],"failures":[],"parameters":{}}')
@example(b'{"outputs":' + b"[" * 100_000)
def test_malformed_layouts_are_value_errors(text: bytes) -> None:
    with pytest.raises(ValueError):
        TOLD.reader.define(0, 0, text)


def test_a_layout_told_once_is_of_the_next_result_alone(told: Told) -> None:
    told.reader.define(0, 7, to_json(ResultLayout((HEAD,))))
    told.put((64, 32))
    for _ in range(2):
        told.reader.define_once(to_json(ResultLayout((STRINGS,), parameters={"k": 1})))
        _, parts, layout = told.reader.read(told.view, 7, 0, 2, (4,))
        assert (flat(parts)[0][0][0], layout.parameters) == ("S", {"k": 1})
        _, parts, _ = told.reader.read(told.view, 7, 0, 2, (4,))
        assert flat(parts)[0][0][0] == "X"


def test_what_is_remembered_is_bounded(told: Told) -> None:
    told.put((64, 32))
    for number in range(3 * REMEMBERED_LAYOUTS):
        told.reader.define(0, number, to_json(ResultLayout((HEAD,))))
    assert len(told.reader._layouts) == 2 * REMEMBERED_LAYOUTS
    with pytest.raises(ValueError, match="a result of layout 0, which it has not told"):
        told.reader.read(told.view, 0, 0, 2, (4,))
    last = 3 * REMEMBERED_LAYOUTS - 1
    for offset in range(10_000):
        told.put((offset % 4000, 32))
        told.reader.read(told.view, last + offset // 4000 - 2, 0, 2, (4,))
        assert told.reader._remembered <= 8192
    assert len(told.reader._known) <= 8192


def test_a_layout_that_comes_again_with_another_meaning(told: Told) -> None:
    """Numbers are not used again; a worker that does so may mislead nobody but itself."""
    told.put((64, 32))
    told.reader.define(0, 1, to_json(ResultLayout((HEAD,))))
    told.reader.read(told.view, 1, 0, 2, (4,))
    told.reader.define(0, 1, to_json(ResultLayout((TensorHead("Y", DataType.UINT8, (4, 8)),))))
    _, parts, _ = told.reader.read(told.view, 1, 0, 2, (4,))
    assert all(begin == 64 and end == 96 for *_, begin, end in flat(parts)[0])


def read_each(told: Told, count: int, requests: int, nbytes: int) -> BatchOutcome:
    """The results of a batch that are told as so many alike, in a slot of so many bytes."""
    told.reader.define(0, 0, to_json(ResultLayout((HEAD,))))
    ENTRY.pack_into(told.memory, 0, RESULT, 0, 0, 0, count, 64, 2)
    for index in range(count):
        told.put((64, 32), 64 + 128 * index)
        told.memory[128 + 128 * index : 160 + 128 * index] = bytes([index]) * 32
    return told.reader.read_batch(told.place, nbytes, 1, (0, 0, 0), (4,) * requests, None, True, True)


def test_results_that_are_alike_are_told_once(told: Told) -> None:
    outcome = read_each(told, 3, 3, 64 + 2 * 128 + 96)
    for index in range(3):
        heads, data = outcome.outputs_of(index)
        assert (heads, [bytes(each) for each in data]) == ((HEAD,), [bytes([index]) * 32])


@pytest.mark.parametrize(("count", "nbytes"), [(3, 64 + 2 * 128 + 95), (4, 1024), (2, 1024), (0, 1024)])
def test_results_that_are_alike_fit_the_batch_and_its_memory(told: Told, count: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="result"):
        read_each(told, count, 3, nbytes)
