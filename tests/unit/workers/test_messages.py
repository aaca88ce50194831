"""Messages to bytes and back; tensors by layouts that are sent once: they arrive unchanged, and nonsense is refused."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from contextlib import nullcontext

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings

from rocserve.backends.request_model import ModelCall, ModelResponse
from rocserve.core.custom_metrics import MetricChange, MetricChanges, MetricKind
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.model_config import ModelConfig
from rocserve.core.plain import from_json, to_json
from rocserve.core.requests import RequestLayout
from rocserve.core.tensors import Tensor, TensorHead, tensor_from_numpy
from rocserve.links import tensors as layouts
from rocserve.links.entries import ENTRY, RESPONSE, TEXT
from rocserve.links.tensors import LONGEST_DETAILS, TensorReader, TensorSender, parameters_text, read_parameters
from rocserve.links.texts import REMEMBERED
from rocserve.plane.heap import Heap, HeapReader
from rocserve.workers import messages
from rocserve.workers.messages import Load, decode_message, encode_message

CONTROL = [
    messages.Load,
    messages.Loaded,
    messages.LoadFailed,
    messages.Progress,
    messages.WarmUp,
    messages.WarmedUp,
    messages.Unload,
    messages.Verbosity,
]
ZYGOTE = [messages.Spawn, messages.Spawned, messages.SpawnFailed, messages.Exited]

st.register_type_strategy(float, st.floats(allow_nan=False))


@pytest.mark.parametrize("kind", CONTROL + ZYGOTE)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_any_message_comes_back_as_it_went(kind: type, data: st.DataObject) -> None:
    message = data.draw(st.from_type(kind))
    assert decode_message(encode_message(message)) == message


@given(st.from_type(RequestLayout))
@settings(max_examples=60, deadline=None)
def test_any_layout_comes_back_as_it_went(layout: RequestLayout) -> None:
    assert from_json(RequestLayout, to_json(layout)) == layout


@given(st.binary(max_size=200))
@example(b"")
@example(b"Load")
@example(b"Load {}")
@example(b"Unload []")
@example(b"Unload " + b"[" * 100_000)
@example(b'Exited {"pid": 1, "wait_status": "x"}')
@example(b'Exited {"pid": 1, "wait_status": true}')
@example(b"Exited " + b"9" * 5000)
def test_malformed_messages_are_value_errors(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode_message(data)


def _damaged(data: bytes, position: int, octet: int) -> bytes:
    damaged = bytearray(data)
    damaged[position % len(damaged)] = octet
    return bytes(damaged)


@given(position=st.integers(0, 10_000), octet=st.integers(0, 255))
def test_damaged_messages_are_read_or_value_errors(position: int, octet: int) -> None:
    config = ModelConfig("m", parameters={"a": "b"})
    load = Load("m", 1, "/a", "/a/1", "/a/1/x", "engine", config)
    try:
        decode_message(_damaged(encode_message(load), position, octet))
    except ValueError:
        pass


def test_fields_that_are_missing_or_new_are_errors() -> None:
    for body in (b'{"pid":1}', b'{"pid":1,"wait_status":2,"more":3}'):
        with pytest.raises(ValueError, match="are not those of Exited"):
            from_json(messages.Exited, body)


def test_text_that_utf8_has_no_form_for_is_escaped() -> None:
    """It would make every answer with it fail, such as the index of all models."""
    progress = messages.Progress("at \udcff", {"\ud800": "\ud83d\ude00"})
    assert decode_message(encode_message(progress)) == messages.Progress("at \\udcff", {"\\ud800": "\U0001f600"})


def test_numbers_beyond_all_bounds_are_errors() -> None:
    change = to_json(MetricChanges((MetricChange("x", MetricKind.GAUGE, "", {}, 1.0),))).replace(b"1.0", b"1" * 400)
    with pytest.raises(ValueError, match="invalid MetricChanges"):
        from_json(MetricChanges, change)


FAR = 1 << 62


class Sides:
    """A heap whose owner sends tensors, and a reader of it."""

    def __init__(self) -> None:
        self.heap = Heap("test", 1 << 24)
        self.known = TensorReader(HeapReader(self.heap.open_for_reading()))
        self.sender = TensorSender(self.heap.allocate, self.heap.allocate, self.post, nullcontext())
        self.defined = 0
        self.responses: list[tuple[int, int, int]] = []
        """Layout, place, and bytes of the details."""

    def post(self, entry: bytes) -> None:
        kind, _, _, layout, _, place, nbytes = ENTRY.unpack(entry)
        if kind == RESPONSE:
            self.responses.append((layout, place, nbytes))
            return
        self.defined += 1
        assert kind == TEXT
        self.known.define(layout, place, nbytes)

    def define(self, number: int, text: bytes) -> None:
        self.known.define(number, self.sender.put_text(text), len(text))

    def send(self, tensors: list[Tensor], details: bytes = b"") -> tuple[int, int, int]:
        """The fields of their entry."""
        layout, place, nbytes = self.sender.put(tensors, details)
        return self.sender.number(layout), place, nbytes


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


@pytest.mark.parametrize("rows", [1, 100, 100_000])
@pytest.mark.parametrize("parameters", [{}, {"a": 1, "b": "x", "c": True, "d": 0.5}])
def test_tensors_and_what_is_said_beside_them(sides: Sides, rows: int, parameters: dict) -> None:
    for sent in (tensors(rows), tensors(rows)[:1], []):
        read, text = sides.known.read(*sides.send(sent, parameters_text(parameters)))
        assert [one.copied() for one in read] == [one.copied() for one in sent]
        assert read_parameters(text) == parameters
        assert all(memoryview(one.data).readonly for one in read)


def test_a_call_travels_without_its_tensors() -> None:
    call = ModelCall("m", (), ("A", "B"), 3, "id", "correlation", 1, 2, 5000, {"k": "v"}, trace_number=7)
    assert from_json(ModelCall, to_json(call)) == call


def test_a_layout_is_sent_once_and_anew_when_it_is_no_longer_known(sides: Sides) -> None:
    for _ in range(3):
        number, place, nbytes = sides.send(tensors(1))
    assert sides.defined == 1
    for width in range(REMEMBERED + 10):
        sides.send([tensor_from_numpy("x", np.zeros(width, np.int8))])
    # The number has another meaning now, and the layout gets another number.
    assert [head.name for head in sides.known.get(number).heads] == ["x"]
    later, place, nbytes = sides.send(tensors(1))
    assert later != number
    assert len(sides.known.read(later, place, nbytes)[0]) == 4
    for width in range(3 * REMEMBERED):
        sides.known.read(*sides.send([tensor_from_numpy("y", np.zeros(width, np.int8))]))
    for remembered in (sides.sender._layouts, sides.sender.sent, sides.known._places, sides.known._bytes):
        assert len(remembered) == REMEMBERED


def test_one_message_may_have_more_layouts_than_are_remembered(sides: Sides) -> None:
    """All have their numbers until it is posted."""
    count = 2 * REMEMBERED
    sent = [
        sides.sender.put([tensor_from_numpy(f"x{number}", np.int8([number % 100]))], b"") for number in range(count)
    ]
    for layout, _, _ in sent:
        layout.pins += 1
    numbers = [sides.sender.number(layout) for layout, _, _ in sent]
    for index, (number, (_, place, nbytes)) in enumerate(zip(numbers, sent, strict=True)):
        ((tensor,), _) = sides.known.read(number, place, nbytes)
        assert (tensor.name, tensor.numpy().tolist()) == (f"x{index}", [index % 100])
    for layout, _, _ in sent:
        layout.pins -= 1
    for number in range(2 * count):
        sides.send([tensor_from_numpy(f"y{number}", np.zeros(1, np.int8))])
    assert len(sides.known._places) == count, "numbers that were needed once are used again"


def test_layouts_without_end_are_refused(sides: Sides) -> None:
    text = to_json((TensorHead("x" * (1 << 16), DataType.INT8, (1,)),))
    place = sides.sender.put_text(text)
    for _ in range(3):
        for number in range(REMEMBERED):
            sides.known.define(number, place, len(text))
    with pytest.raises(ValueError, match=f"{REMEMBERED + 1} layouts of .* bytes, expected at most"):
        sides.known.define(1 << 20, place, len(text))


def test_layouts_that_other_threads_send_meanwhile_do_not_push_out_that_of_a_large_response(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, others = layouts.fill, itertools.count(1)

    def copy_slowly(view: memoryview, pieces: list[bytes]) -> None:
        copy(view, pieces)
        for width in itertools.islice(others, 3 * REMEMBERED):
            number = sides.sender.number(sides.sender.of([tensor_from_numpy("x", np.zeros(width, np.int8))]))
            assert sides.known.get(number).heads[0].shape == (width,)

    monkeypatch.setattr(layouts, "fill", copy_slowly)
    for count in (1, 2, 1):
        message, _ = sides.sender.answer(1, ModelResponse(tensors(count)), True)
        sides.sender.post(message)
        received, _ = sides.known.read(*sides.responses.pop())
        assert [one.numpy().tolist() for one in received] == [one.numpy().tolist() for one in tensors(count)]


def test_a_layout_that_is_kept_is_sent_anew_before_it_is_forgotten(sides: Sides) -> None:
    kept = sides.sender.of(tensors(1))
    for width in range(3 * REMEMBERED):
        sides.send([tensor_from_numpy("x", np.zeros(width, np.int8))])
        assert sides.known.get(sides.sender.number(kept)).heads == kept.places.heads


def test_what_does_not_fit_is_refused(sides: Sides) -> None:
    for call in (
        lambda: sides.send([], b"x" * (LONGEST_DETAILS + 1)),
        lambda: sides.send([Tensor("x" * LONGEST_DETAILS, DataType.INT8, (1,), b"1")]),
    ):
        with pytest.raises(ServeError, match=f"at most {LONGEST_DETAILS} can be sent"):
            call()
    numbers = tensors(2)[0]
    with pytest.raises(ServeError, match=r"tensor 'numbers' of shape \[2, 4\] needs 32 bytes, got 24"):
        sides.send([Tensor("numbers", numbers.datatype, (2, 4), numbers.data)])


@pytest.mark.parametrize("place", [FAR, (1 << 64) - 8])
def test_a_place_elsewhere(sides: Sides, place: int) -> None:
    number, _, _ = sides.send(tensors(1))
    for call in (
        lambda: sides.known.read(number, place, 0),
        lambda: sides.known.define(1, place, 10),
        lambda: sides.known.text(place, 10),
    ):
        with pytest.raises(ValueError, match="lies outside of its heap"):
            call()


def test_lengths_that_make_no_sense(sides: Sides) -> None:
    number, place, _ = sides.send(tensors(1))
    with pytest.raises(ValueError, match="a text of 1099511627776 bytes, expected at most"):
        sides.known.read(number, place, 1 << 40)
    (words,) = (one for one in tensors(1) if one.name == "words")
    number, place, _ = sides.send([words])
    for size, reason in ((1 << 40, "lies outside of its heap"), (1 << 20, "was not written to its end")):
        sides.heap.view(place, 8)[:] = size.to_bytes(8, "little")
        with pytest.raises(ValueError, match=reason):
            sides.known.read(number, place, 0)
    sides.heap.view(place, 8)[:] = (7).to_bytes(8, "little")
    with pytest.raises(ValueError, match=r"tensor 'words' of shape \[1, 2\] has 7 bytes"):
        sides.known.read(number, place, 0)


@pytest.mark.parametrize(
    "head",
    [
        TensorHead("x", DataType.INT32, (-4, -2)),
        TensorHead("x", DataType.UINT8, (0, 1 << 64)),
        TensorHead("x", DataType.BYTES, (1 << 64,)),
    ],
)
def test_tensors_that_cannot_be_are_refused(sides: Sides, head: TensorHead) -> None:
    with pytest.raises(ValueError, match="tensor 'x' of shape"):
        sides.define(1, to_json((head,)))


def test_a_layout_that_takes_long_to_read_is_none(sides: Sides) -> None:
    """The server does nothing else meanwhile: 70,000 tensors took it 0.8 s and 15 MB."""
    heads = [TensorHead("", DataType.INT8, ())] * 20_000
    with pytest.raises(ValueError, match="commas, expected at most 32768"):
        sides.define(1, to_json(tuple(heads)))
    with pytest.raises(ServeError, match="20000 tensors and their sizes exceed the longest message"):
        sides.sender.of([Tensor(*head, b"\0") for head in heads])
    with pytest.raises(ValueError, match="a tensor of 65 dimensions"):
        sides.define(1, to_json((TensorHead("x", DataType.INT8, (1,) * 65),)))
    most = tuple([TensorHead(f"output_{number}", DataType.FP32, (1,) * 29) for number in range(1024)])
    sides.define(1, to_json(most))


def test_parameters_of_a_response_are_bounded_in_number(sides: Sides) -> None:
    """As a request's are: the server needed 0.6 s for 100,000. A text among them may be as long."""
    many, text = {str(number): 1 for number in range(16385)}, {"json": json.dumps({str(n): 1 for n in range(20000)})}
    with pytest.raises(ServeError, match="a response has 16385 parameters, at most 16384 can be sent"):
        sides.sender.answer(1, ModelResponse([], many), True)
    with pytest.raises(ValueError, match="16385 parameters, expected at most 16384"):
        read_parameters(to_json(many))
    with pytest.raises(ValueError, match="nested too deeply"):
        read_parameters(b'{"":' * 100_000)
    assert read_parameters(to_json(text)) == text
    del many["0"]
    assert read_parameters(to_json(many)) == many


SIDES = Sides()
"""Shared by the many examples of a property."""


@given(st.binary(max_size=200))
@example(b"")
@example(b"{}")
@example(b"\xff\xff\xff\xff" + b"\x00" * 64)
@example(b'[["x","FP99",[1]]]')
@example(b'[["x","FP32"]]')
@example(b"[" * 100_000)
def test_malformed_layouts_are_value_errors(text: bytes) -> None:
    if text.strip() == b"[]":
        return
    with pytest.raises(ValueError):
        SIDES.define(0, text)


def test_nonsense_raises_nothing_else(sides: Sides) -> None:
    generator = random.Random(0)
    number, place, nbytes = sides.send(tensors(1), to_json(ModelCall("m", (), ("A",))))
    view = sides.heap.view(place, 1024)
    good = bytes(view)
    for _ in range(3000):
        view[:] = good
        for _ in range(generator.randint(1, 4)):
            view[generator.randrange(len(view))] = generator.randrange(256)
        try:
            read, text = sides.known.read(number, place, nbytes + generator.choice((-1, 0, 0, 1)))
            assert sum(len(one.data) for one in read) <= 1 << 24
            from_json(ModelCall, text)
        except ValueError:
            continue
