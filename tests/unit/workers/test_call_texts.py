"""What stands beside the tensors of a model's calls and of their answers, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from rocserve.backends.request_model import ModelCall, ModelResponse
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.plain import to_json
from rocserve.core.tensors import Tensor, tensor_from_numpy
from rocserve.plane.heap import Heap, HeapFull, HeapReader
from rocserve.workers.call_texts import call_layout, read_call, read_response, write, write_response
from rocserve.workers.entries import LONGEST_TEXT_BYTES, numbers


class Sides:
    """A heap and a reader of it."""

    def __init__(self) -> None:
        self.heap = Heap("test", 1 << 24)
        self.reader = HeapReader(self.heap.open_for_reading())

    def write(self, call: ModelCall) -> tuple[int, int]:
        """The place of a call, and how many numbers it has."""
        slot, count = write(self.heap.place, to_json(call_layout(call)), call.inputs)
        place = slot.offset
        del slot
        return place, count


@pytest.fixture
def sides() -> Iterator[Sides]:
    sides = Sides()
    yield sides
    sides.heap.close()


def tensors(rows: int) -> list[Tensor]:
    generator = np.random.default_rng(rows)
    return [
        tensor_from_numpy("numbers", generator.random((rows, 3), np.float32)),
        tensor_from_numpy("words", np.array([[b"", b"\xff" * rows]], dtype=object)),
        tensor_from_numpy("nothing", np.zeros((0, 4), np.int8)),
        tensor_from_numpy("flags", generator.integers(0, 2, rows).astype(bool)),
    ]


def same(left: Tensor, right: Tensor) -> bool:
    return (left.name, left.datatype, tuple(left.shape), bytes(left.data)) == (
        right.name,
        right.datatype,
        tuple(right.shape),
        bytes(right.data),
    )


@pytest.mark.parametrize("rows", [1, 100, 100_000])
def test_a_response(sides: Sides, rows: int) -> None:
    sent = tensors(rows)
    slot, code, count = write_response(sides.heap, ModelResponse(sent, {"a": 1, "b": "x", "c": True, "d": 0.5}))
    assert code == 0
    answer = read_response(sides.reader, slot.offset, count)
    assert dict(answer.parameters) == {"a": 1, "b": "x", "c": True, "d": 0.5}
    assert all(same(got, was) for got, was in zip(answer.outputs, sent, strict=True))
    # They are the reader's own.
    answer.outputs[0].numpy()[:] = 1.0
    assert (answer.outputs[0].numpy() == 1.0).all()
    assert same(answer.outputs[1], sent[1])


def test_an_error(sides: Sides) -> None:
    slot, code, nbytes = write_response(sides.heap, ServeError(StatusCode.NOT_FOUND, "\N{SNOWMAN}" * 100_000))
    assert code == StatusCode.NOT_FOUND
    assert bytes(sides.reader.view(slot.offset, nbytes)).decode() == "\N{SNOWMAN}" * 8192


def test_a_call(sides: Sides) -> None:
    call = ModelCall("m", tensors(2), ("A", "B"), 3, "id", "correlation", 1, 2, 5000, {"k": "v"}, trace_number=7)
    got = read_call(sides.reader, *sides.write(call))
    assert all(same(left, right) for left, right in zip(got.inputs, call.inputs, strict=True))
    assert all(memoryview(tensor.data).readonly for tensor in got.inputs)
    assert (got.model_name, got.requested_outputs, got.model_version, got.id) == ("m", ("A", "B"), 3, "id")
    assert (got.correlation_id, got.flags, got.priority, got.timeout_microseconds) == ("correlation", 1, 2, 5000)
    assert (got.parameters, got.trace_number) == ({"k": "v"}, 7)


def test_what_does_not_fit_is_refused(sides: Sides) -> None:
    with pytest.raises(ValueError, match=f"at most {LONGEST_TEXT_BYTES} can be sent"):
        write_response(sides.heap, ModelResponse([], {"k": "x" * LONGEST_TEXT_BYTES}))
    tensor = tensors(2)[0]
    with pytest.raises(ValueError, match=r"tensor 'numbers' of shape \[2, 4\] needs 32 bytes, got 24"):
        write_response(sides.heap, ModelResponse([Tensor("numbers", tensor.datatype, (2, 4), tensor.data)]))
    with pytest.raises(HeapFull):
        write_response(sides.heap, ModelResponse([tensor_from_numpy("x", np.zeros(sides.heap.limit, np.uint8))]))


@pytest.mark.parametrize(
    ("count", "table", "reason"),
    [
        (0, (), "0 numbers before a text"),
        (1 << 40, (), f"{1 << 40} numbers before a text"),
        (1, (1 << 40,), "a text of 1099511627776 bytes, expected at most"),
        (2, (LONGEST_TEXT_BYTES, 1 << 40), "lies outside of its heap"),
        (2, (2, 1 << 23), "was not written to its end"),
        (1, (2,), "CallLayout"),
    ],
)
def test_numbers_that_make_no_sense(sides: Sides, count: int, table: tuple[int, ...], reason: str) -> None:
    place = sides.heap.allocate(1 << 24)
    view = sides.heap.view(place, 4096)
    view[:] = b"{}" * 2048
    numbers(len(table)).pack_into(view, 0, *table)
    if table[:1] == (LONGEST_TEXT_BYTES,):
        sides.heap.view(place, 2 << 20)[4096:] = bytes((2 << 20) - 4096)
    with pytest.raises(ValueError, match=reason):
        read_call(sides.reader, place, count)


def test_a_place_elsewhere(sides: Sides) -> None:
    for place in (1 << 62, (1 << 64) - 8):
        with pytest.raises(ValueError, match="lies outside of its heap"):
            read_call(sides.reader, place, 1)


def test_tensors_other_than_told(sides: Sides) -> None:
    call = ModelCall("m", tensors(2), ())
    text = to_json(call_layout(call))
    slot, count = write(sides.heap.place, text, call.inputs[1:])
    with pytest.raises(ValueError, match="3 tensors, told of 4"):
        read_call(sides.reader, slot.offset, count)
    others = [call.inputs[3], *call.inputs[1:]]
    slot, count = write(sides.heap.place, text, others)
    with pytest.raises(ValueError, match=r"tensor 'numbers' of shape \[2, 3\] needs 24 bytes, got 2"):
        read_call(sides.reader, slot.offset, count)


def test_nonsense_raises_nothing_else(sides: Sides) -> None:
    generator = random.Random(0)
    slot, count = write(sides.heap.place, to_json(call_layout(ModelCall("m", tensors(1), ("A",)))), tensors(1))
    view = sides.heap.view(slot.offset, 1024)
    good = bytes(view)
    for _ in range(3000):
        view[:] = good
        for _ in range(generator.randint(1, 4)):
            view[generator.randrange(len(view))] = generator.randrange(256)
        try:
            read_call(sides.reader, slot.offset, generator.choice((count, count, count - 1, count + 1)))
        except ValueError:
            continue
