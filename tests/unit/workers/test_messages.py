"""Messages to bytes and back."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from rocserve.core.custom_metrics import MetricChange, MetricChanges, MetricKind
from rocserve.core.errors import StatusCode
from rocserve.core.model_config import ModelConfig
from rocserve.core.plain import from_json, to_json
from rocserve.core.request_form import RequestLayout
from rocserve.core.requests import Signature
from rocserve.workers import messages
from rocserve.workers.messages import LaunchOptions, Load, Spawn, decode_message, encode_message, status_code

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
@settings(max_examples=40, deadline=None)
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


def test_a_code_that_does_not_exist_is_internal() -> None:
    assert (status_code(3), status_code(99)) == (StatusCode.INVALID_ARGUMENT, StatusCode.INTERNAL)


def test_fields_that_are_missing_or_new_are_errors() -> None:
    for body in (b'{"pid":1}', b'{"pid":1,"wait_status":2,"more":3}'):
        with pytest.raises(ValueError, match="are not those of Exited"):
            from_json(messages.Exited, body)


def test_sets_and_options_keep_their_types() -> None:
    signature = Signature((), (), True, frozenset({"b", "a"}))
    assert from_json(Signature, to_json(signature)) == signature
    spawn = Spawn(LaunchOptions("t", False, environment={"A": "\xff"}))
    assert decode_message(encode_message(spawn)) == spawn


def test_text_that_utf8_has_no_form_for_is_escaped() -> None:
    """It would fail all answers with it, such as the index of all models."""
    progress = messages.Progress("at \udcff", {"\ud800": "\ud83d\ude00"})
    assert decode_message(encode_message(progress)) == messages.Progress("at \\udcff", {"\\ud800": "\U0001f600"})


def test_numbers_beyond_all_bounds_are_errors() -> None:
    change = to_json(MetricChanges((MetricChange("x", MetricKind.GAUGE, "", {}, 1.0),))).replace(b"1.0", b"1" * 400)
    with pytest.raises(ValueError, match="cannot be read"):
        from_json(MetricChanges, change)
