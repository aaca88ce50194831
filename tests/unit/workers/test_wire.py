"""Messages to bytes and back."""

from __future__ import annotations

import time

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from rocserve.core.custom_metrics import MetricChange, MetricChanges, MetricKind
from rocserve.core.datatypes import DataType
from rocserve.core.errors import StatusCode
from rocserve.core.model_config import InstanceKind, ModelConfig
from rocserve.core.plain import from_json, to_json
from rocserve.core.requests import Signature
from rocserve.workers import messages
from rocserve.workers.batch_outputs import OutputLayouts
from rocserve.workers.messages import (
    BatchLayout,
    Load,
    RequestResult,
    RequestResults,
    ResultLayout,
    Spawn,
    TensorHead,
)
from rocserve.workers.request_outputs import RequestOutputLayouts
from rocserve.workers.wire import (
    LayoutReader,
    decode_message,
    encode_message,
    pack_tail,
    status_code,
    unpack_tail,
)

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
NUMBERS = st.lists(st.integers(0, 2**64 - 1), max_size=40)

st.register_type_strategy(float, st.floats(allow_nan=False))


@pytest.mark.parametrize("kind", CONTROL + ZYGOTE)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_message_comes_back_as_it_went(kind: type, data: st.DataObject) -> None:
    message = data.draw(st.from_type(kind))
    assert decode_message(encode_message(message)) == message


@pytest.mark.parametrize(
    "kind",
    [
        BatchLayout,
        ResultLayout,
        messages.BatchFailure,
        messages.RequestDetails,
        messages.RequestResults,
        messages.AnswerLayout,
        messages.CallLayout,
    ],
)
@given(data=st.data(), numbers=NUMBERS)
@settings(max_examples=60, deadline=None)
def test_any_layout_comes_back_as_it_went(kind: type, data: st.DataObject, numbers: list[int]) -> None:
    layout = data.draw(st.from_type(kind))
    tail = pack_tail(numbers, to_json(layout))
    got_numbers, body = unpack_tail(tail)
    assert list(got_numbers) == numbers
    assert LayoutReader(kind).read(body) == layout


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


@given(st.binary(max_size=200))
@example(b"\x01\x00\x00\x00")
@example(b"\xff\xff\xff\xff" + b"\x00" * 64)
@example(b"\x00\x00\x00\x00{}")
@example(b'\x00\x00\x00\x00{"outputs":[{"name":"x","datatype":"FP99","shape":[1]}],"failures":[]}')
def test_malformed_results_are_value_errors(tail: bytes) -> None:
    with pytest.raises(ValueError):
        OutputLayouts().of(tail, (1,))


def _damaged(data: bytes, position: int, octet: int) -> bytes:
    damaged = bytearray(data)
    damaged[position % len(damaged)] = octet
    return bytes(damaged)


@given(position=st.integers(0, 10_000), octet=st.integers(0, 255))
def test_damaged_messages_are_read_or_value_errors(position: int, octet: int) -> None:
    config = ModelConfig("m", parameters={"a": "b"})
    load = Load("m", 1, "/a", "/a/1", "/a/1/x", "engine", config, InstanceKind.CPU, None, 2)
    try:
        decode_message(_damaged(encode_message(load), position, octet))
    except ValueError:
        pass


HEAD = TensorHead("X", DataType.INT32, (4, 2))
STRINGS = TensorHead("S", DataType.BYTES, (4,))


@pytest.mark.parametrize(
    ("heads", "numbers", "sizes"),
    [
        ((HEAD,), (0, 32), (3, 2)),
        ((HEAD,), (0, 31), (4,)),
        ((HEAD,), (0, 31), (2, 2)),
        ((HEAD,), (0,), (4,)),
        ((TensorHead("X", DataType.INT32, (-4, -2)),), (0, 32), (4,)),
        ((TensorHead("X", DataType.INT32, ()),), (0, 4), (2, 2)),
        ((STRINGS,), (0, 32), (2, 2)),
        ((STRINGS,), (0, 32, 0, 40, 32), (2, 2)),
        ((STRINGS,), (0, 32, 1, 16, 32), (2, 2)),
        ((STRINGS,), (0, 32, 0, 16, 31), (2, 2)),
        ((STRINGS,), (0, 32, 0, 16), (2, 2)),
    ],
)
def test_outputs_that_do_not_fit_together(
    heads: tuple[TensorHead, ...], numbers: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"output|numbers"):
        OutputLayouts().of(pack_tail(numbers, to_json(ResultLayout(heads))), sizes)


@given(st.binary(min_size=1, max_size=300), st.integers(0, 1), st.integers(1, 3))
def test_whatever_is_accepted_lies_within_its_end(octets: bytes, which: int, requests: int) -> None:
    count = len(octets) // 2
    numbers = [int.from_bytes(octets[2 * index : 2 * index + 2]) % 64 for index in range(count)]
    layout = ResultLayout(((HEAD, STRINGS), (STRINGS, HEAD))[which])
    try:
        outputs = OutputLayouts().of(pack_tail(numbers, to_json(layout)), (4 // requests,) * requests)
    except ValueError:
        return
    assert all(0 <= begin <= end <= outputs.end for slices in outputs.slices for *_, begin, end in slices)


def test_a_failure_of_no_request() -> None:
    layout = ResultLayout((), (messages.RequestFailure(2, 3, "x"),))
    with pytest.raises(ValueError, match="a failure of request 2 of 2"):
        OutputLayouts().of(pack_tail((), to_json(layout)), (1, 1))


def test_a_code_that_does_not_exist_is_internal() -> None:
    assert (status_code(3), status_code(99)) == (StatusCode.INVALID_ARGUMENT, StatusCode.INTERNAL)


def test_fields_that_are_missing_or_new_are_errors() -> None:
    for body in (b'{"pid":1}', b'{"pid":1,"wait_status":2,"more":3}'):
        with pytest.raises(ValueError, match="are not those of Exited"):
            from_json(messages.Exited, body)


def test_sets_and_options_keep_their_types() -> None:
    signature = Signature((), (), True, frozenset({"b", "a"}))
    assert from_json(Signature, to_json(signature)) == signature
    spawn = Spawn(1, "t", False, environment={"A": "\xff"})
    assert decode_message(encode_message(spawn)) == spawn


def test_text_that_utf8_has_no_form_for_is_escaped() -> None:
    """It would fail whoever puts it into an answer, such as the index of all models."""
    progress = messages.Progress("at \udcff", {"\ud800": "\ud83d\ude00"})
    assert decode_message(encode_message(progress)) == messages.Progress("at \\udcff", {"\\ud800": "\U0001f600"})


def test_numbers_beyond_all_bounds_are_errors() -> None:
    change = to_json(MetricChanges((MetricChange("x", MetricKind.GAUGE, "", {}, 1.0),))).replace(b"1.0", b"1" * 400)
    with pytest.raises(ValueError, match="cannot be read"):
        from_json(MetricChanges, change)


def test_remembered_layouts_are_bounded_and_quick() -> None:
    reader = LayoutReader(BatchLayout)
    for number in range(5000):
        reader.read(to_json(BatchLayout((), (), (number,))))
    assert len(reader._layouts) <= 1024
    body = to_json(BatchLayout((HEAD,), ("Y",), (1,)))
    tail = pack_tail((0, 32), body)
    reader.read(body)
    started = time.perf_counter()
    for _ in range(1000):
        _, text = unpack_tail(tail)
        reader.read(text)
    assert (time.perf_counter() - started) / 1000 < 100e-6


@pytest.mark.parametrize(
    ("heads", "numbers"),
    [
        # Two outputs on the same memory: a little memory would become a large response.
        ((TensorHead("a", DataType.UINT8, (1, 64)), TensorHead("b", DataType.UINT8, (1, 64))), (0, 64, 0, 64)),
        ((TensorHead("a", DataType.BYTES, (1, 1 << 40)),), (0, 64)),
        ((TensorHead("a", DataType.UINT8, (0, 1 << 64)),), (0, 0)),
    ],
)
def test_outputs_that_cannot_be_are_refused(heads: tuple[TensorHead, ...], numbers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"has \d+ bytes|outputs of 128 bytes in 64 bytes"):
        OutputLayouts().of(pack_tail(numbers, to_json(ResultLayout(heads))), (1,))
    results = RequestResults((RequestResult(heads),))
    with pytest.raises(ValueError, match=r"has \d+ bytes|outputs of 128 bytes in 64 bytes"):
        RequestOutputLayouts().of(pack_tail(numbers, to_json(results)), (1,))
