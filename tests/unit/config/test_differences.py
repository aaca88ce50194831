"""The difference between a configuration as it is written and as it was completed."""

from __future__ import annotations

from rocserve.config.differences import compared, config_lines
from rocserve.config.pbtxt import parse_model_config
from rocserve.protocol.model_config_pb2 import ModelConfig


def test_what_was_completed_and_what_does_not_hold() -> None:
    written = parse_model_config('# a comment\nmax_batch_size: 8, input [{ dims: [ 4 ], name: "X" }]', "config.pbtxt")
    completed = parse_model_config(
        'name: "m" max_batch_size: 4 input { name: "X" data_type: TYPE_FP32 dims: 4 }', "config.pbtxt"
    )
    assert compared(written, completed) == [
        ("-", "max_batch_size: 8"),
        ("+", 'name: "m"'),
        ("+", "max_batch_size: 4"),
        ("", "input {"),
        ("", '  name: "X"'),
        ("+", "  data_type: TYPE_FP32"),
        ("", "  dims: 4"),
        ("", "}"),
    ]
    assert compared(completed, completed) == [("", line) for line in config_lines(completed)]


def test_texts_of_any_language_are_readable() -> None:
    assert config_lines(ModelConfig(name="模型 <b>")) == ['name: "模型 <b>"']


def test_what_is_too_long_is_not_compared() -> None:
    long = ModelConfig(input=[{"name": str(number)} for number in range(1000)])
    assert compared(long, long) is None
