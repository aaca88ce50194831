"""What one configuration may ask of the machine; and the limits in a model's parameters, valid and invalid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rocserve.backends.parameters import read_integer
from rocserve.config import bounds
from rocserve.config.model_folder import read_labels
from rocserve.config.model_limits import time_limits, worker_bounds
from rocserve.config.pbtxt import parse_model_config, read_text
from rocserve.config.sources import parse_override
from rocserve.config.validation import check_readable
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import ModelConfig
from rocserve.settings import TimeLimits

HEAD = 'name: "m" backend: "python"\n'
MANY = bounds.MOST_TENSORS + 1


def refusal(text: str) -> str:
    with pytest.raises(ServeError) as caught:
        bounds.check_bounds(parse_model_config(HEAD + text, "config.pbtxt"))
    return caught.value.text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('input { name: "I" }' * MANY, "model 'm' has 1025 inputs, at most 1024 are possible"),
        ('output { name: "O" }' * MANY, "model 'm' has 1025 outputs, at most 1024 are possible"),
        (f'input {{ name: "I" dims: [ {", ".join("1" * 33)} ] }}', "input 'I' of model 'm' has 33 dims, at most 32"),
        (
            'output { name: "O" data_type: TYPE_FP64 dims: [ 4294967296, 4294967296 ] }',
            "output 'O' of model 'm' has dims [4294967296,4294967296], which are 147573952589676412928 bytes, at most"
            " 9223372036854775807 are possible",
        ),
        (
            'model_warmup { batch_size: 1024 inputs { key: "I" value { data_type: TYPE_FP32 dims: 1048576 } } }',
            "the warm-up samples of model 'm' have 4294967296 bytes, at most 2147483647 are possible",
        ),
        (
            'sequence_batching { state { input_name: "S" data_type: TYPE_FP32 dims: [ 65536, 65536 ] } }',
            "state 'S' of model 'm' has 17179869184 bytes, at most 2147483647 are possible",
        ),
    ],
)
def test_what_is_beyond_a_bound_is_refused_with_it(text: str, expected: str) -> None:
    assert refusal(text).startswith(expected)


def test_an_ensemble_with_too_many_steps_is_refused_before_they_are_looked_at() -> None:
    steps = 'step { model_name: "a" } ' * (bounds.MOST_STEPS + 1)
    message = parse_model_config(f'name: "e" platform: "ensemble" ensemble_scheduling {{ {steps} }}', "config.pbtxt")
    with pytest.raises(ServeError, match="ensemble 'e' has 1025 steps, at most 1024 are possible"):
        check_readable(message)


def test_many_small_warm_up_samples_count_together() -> None:
    sample = 'inputs { key: "I" value { data_type: TYPE_UINT8 dims: 1073741824 } }'
    bounds.check_bounds(parse_model_config(HEAD + f"model_warmup {{ {sample} }}", "config.pbtxt"))
    assert "the warm-up samples of model 'm' have 2147483648 bytes" in refusal(f"model_warmup {{ {sample} }}" * 2)


def test_dims_of_any_size_are_not_counted() -> None:
    text = 'input { name: "I" data_type: TYPE_FP32 dims: [ -1, 4611686018427387903, -1 ] }'
    with pytest.raises(ServeError):
        bounds.check_bounds(parse_model_config(HEAD + text, "config.pbtxt"))
    bounds.check_bounds(parse_model_config(HEAD + text.replace("TYPE_FP32", "TYPE_UINT8"), "config.pbtxt"))


def test_a_configuration_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_text("#" * bounds.MOST_CONFIG_BYTES)
    assert len(read_text(path)) == bounds.MOST_CONFIG_BYTES
    path.write_text("#" * (bounds.MOST_CONFIG_BYTES + 1))
    with pytest.raises(ServeError, match=r"config.pbtxt is larger than the 1048576 bytes"):
        read_text(path)
    with pytest.raises(ServeError, match="the load request's config is larger than the 1048576 bytes"):
        parse_override(" " * (bounds.MOST_CONFIG_BYTES + 1))


@pytest.mark.parametrize("content", [b"a\n" * (bounds.MOST_LABELS + 1), b"a" * (bounds.MOST_LABEL_BYTES + 1)])
def test_a_label_file_that_is_too_large_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "labels.txt").write_bytes(content)
    message = parse_model_config('output { name: "O" label_filename: "labels.txt" }', "config.pbtxt")
    with pytest.raises(ServeError, match=r"labels.txt is larger than the 1000000 lines and 16777216 bytes"):
        read_labels(message, tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("input { data_type: 15 }", "config.pbtxt: unknown value 15 of DataType in 'data_type'; expected one of:"),
        ("instance_group { kind: -1 }", "config.pbtxt: unknown value -1 of Kind in 'kind'; expected one of: KIND_AUTO"),
        (
            'model_warmup { inputs { key: "I" value { data_type: 99 } } }',
            "config.pbtxt: unknown value 99 of DataType in 'data_type'",
        ),
        ("input { data_type: 2147483648 }", "config.pbtxt: value out of range: 2147483648"),
    ],
)
def test_a_number_that_an_enumeration_does_not_know(text: str, expected: str) -> None:
    with pytest.raises(ServeError) as caught:
        parse_model_config(text, "config.pbtxt")
    assert caught.value.text.startswith(expected)


def test_a_number_that_an_enumeration_does_not_know_in_a_load_request() -> None:
    with pytest.raises(ServeError, match="Invalid config override: unknown value 15 of DataType"):
        parse_override('{"input": [{"name": "I", "data_type": 15}]}')


def test_a_field_with_an_endless_name_is_an_unknown_field() -> None:
    with pytest.raises(ServeError, match="unknown field"):
        parse_model_config("a" * 200_000 + ": 1", "config.pbtxt")


def test_as_many_states_as_a_configuration_can_hold_are_compared_at_once() -> None:
    fields = 'input_name:"a{0}" output_name:"b{0}" data_type:TYPE_INT8'
    states = "".join(f"state{{{fields.format(number)}}}" for number in range(bounds.MOST_CONFIG_BYTES // 65))
    check_readable(parse_model_config(f"{HEAD} sequence_batching {{ {states} }}", "config.pbtxt"))


def test_outputs_with_the_same_labels_hold_them_once(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("cat\ndog\n")
    outputs = "".join(f'output {{ name: "O{number}" label_filename: "labels.txt" }}' for number in range(3))
    labels = read_labels(parse_model_config(outputs, "config.pbtxt"), tmp_path)
    assert labels == dict.fromkeys(("O0", "O1", "O2"), ("cat", "dog"))
    assert labels["O0"] is labels["O2"]


@pytest.mark.parametrize("name", ["..", "a/b", "a\nb", "a\x1b[2Jb"])
def test_a_name_that_no_folder_should_have(name: str) -> None:
    message = parse_model_config(HEAD, "config.pbtxt")
    message.name = name
    with pytest.raises(ServeError, match="a model cannot have the name") as caught:
        check_readable(message)
    assert caught.value.text.isprintable()


@pytest.mark.parametrize("value", ["0", "17", "-1", "18446744073709551616", "9" * 5000, "many"])
def test_a_parameter_beyond_its_bounds_is_refused(value: str) -> None:
    config = ModelConfig("m", parameters={"threads": value})
    with pytest.raises(ServeError, match="must be a whole number from 1 to 16"):
        read_integer(config, "threads", 4, 1, 16)


def test_parameters_go_before_the_flags_and_leave_the_others() -> None:
    parameters = {"request_timeout_secs": "2.5", "load_timeout_secs": "0", "worker_tasks": "40", "other": "x"}
    assert time_limits(parameters, TimeLimits()) == TimeLimits(request_timeout_seconds=2.5, load_timeout_seconds=0.0)
    assert worker_bounds(parameters) == {"tasks": 40}


@pytest.mark.parametrize("text", ["", "soon", "-1", "nan", "inf"])
def test_what_is_no_time_is_refused(text: str) -> None:
    expected = f"parameter 'hang_timeout_secs': expected a number of seconds, 0 for no limit, got '{text}'"
    with pytest.raises(ServeError, match=re.escape(expected)) as refused:
        time_limits({"hang_timeout_secs": text}, TimeLimits())
    assert refused.value.code is StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("text", ["", "much", "-1", "1.5", "1" * 19, "\u0663"])
def test_what_is_no_number_is_refused(text: str) -> None:
    expected = f"parameter 'worker_memory_bytes': expected a whole number, 0 for no bound, got '{text}'"
    with pytest.raises(ServeError, match=re.escape(expected)) as refused:
        worker_bounds({"worker_memory_bytes": text})
    assert refused.value.code is StatusCode.INVALID_ARGUMENT
