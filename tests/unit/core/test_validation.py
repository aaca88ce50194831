"""Requests against a model's configuration: valid ones, and Triton's words for the others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import InputConfig, ModelConfig, OutputConfig
from rocserve.core.requests import InferRequest, InputHead, RequestedOutput, RequestHead
from rocserve.core.validation import RequestValidator, reshape_dims

ADD_SUB = ModelConfig(
    name="m",
    backend="onnx",
    max_batch_size=8,
    inputs=(InputConfig("INPUT0", DataType.INT32, (16,)), InputConfig("INPUT1", DataType.INT32, (16,))),
    outputs=(OutputConfig("OUTPUT0", DataType.INT32, (16,)), OutputConfig("OUTPUT1", DataType.INT32, (16,))),
)


def request(
    *inputs: tuple[str, str, tuple[int, ...], bytes], outputs: tuple[RequestedOutput, ...] = (), **parameters: int
) -> InferRequest:
    head = RequestHead(
        "m", "", tuple(InputHead(name, datatype, shape) for name, datatype, shape, _ in inputs), outputs, parameters
    )
    return InferRequest(head, "", [data for *_, data in inputs])


def ints(name: str, shape: tuple[int, ...] = (1, 16), datatype: str = "INT32", size: int | None = None):
    count = 1
    for side in shape:
        count *= side
    return name, datatype, shape, bytes(count * 4 if size is None else size)


def error_of(config: ModelConfig, bad: InferRequest) -> str:
    with pytest.raises(ServeError) as caught:
        RequestValidator(config).validate(bad)
    assert caught.value.code is StatusCode.INVALID_ARGUMENT
    return caught.value.text


def test_plan_of_a_good_request():
    plan = RequestValidator(ADD_SUB).validate(
        request(ints("INPUT1", (3, 16)), ints("INPUT0", (3, 16)), priority=2, timeout=7000)
    )
    assert plan.batch_size == 3
    assert [entry.name for entry in plan.inputs] == ["INPUT1", "INPUT0"]
    assert plan.batch_key == (("INPUT0", DataType.INT32, (16,)), ("INPUT1", DataType.INT32, (16,)))
    assert plan.outputs == ("OUTPUT0", "OUTPUT1")
    assert (plan.priority, plan.timeout_microseconds) == (2, 7000)


def test_order_of_inputs_does_not_keep_requests_apart():
    validator = RequestValidator(ADD_SUB)
    one = validator.validate(request(ints("INPUT0"), ints("INPUT1")))
    other = validator.validate(request(ints("INPUT1"), ints("INPUT0")))
    assert one.batch_key == other.batch_key


def test_a_head_is_checked_once_but_data_every_time():
    validator = RequestValidator(ADD_SUB)
    good = request(ints("INPUT0"), ints("INPUT1"))
    assert validator.validate(good) is validator.validate(good)
    with pytest.raises(ServeError, match="Expected 64, got 60"):
        validator.validate(InferRequest(good.head, "", [bytes(64), bytes(60)]))


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (
            request(ints("INPUT0"), ints("X")),
            "unexpected inference input 'X' for model 'm'; its inputs are: INPUT0, INPUT1",
        ),
        (
            request(ints("INPUT0"), ints("INPUT1"), outputs=(RequestedOutput("NOPE"),)),
            "unexpected inference output 'NOPE' for model 'm'; its outputs are: OUTPUT0, OUTPUT1",
        ),
        (
            request(ints("INPUT0"), ints("INPUT1"), ints("INPUT0")),
            "[request id: <id_unknown>] input 'INPUT0' already exists in request",
        ),
        (
            request(
                ints("INPUT0"),
                ints("INPUT1"),
                outputs=(
                    RequestedOutput("OUTPUT1"),
                    RequestedOutput("OUTPUT0"),
                    RequestedOutput("OUTPUT1", {"classification": 2}),
                ),
            ),
            "[request id: <id_unknown>] output 'OUTPUT1' already exists in request",
        ),
    ],
)
def test_what_is_wrong_is_said_in_tritons_words(bad: InferRequest, text: str):
    assert error_of(ADD_SUB, bad) == text


def test_an_input_that_the_model_does_not_have_is_named():
    """Triton's sentence speaks of missing inputs, and here none is missing."""
    assert error_of(ADD_SUB, request(ints("INPUT0"), ints("INPUT1"), ints("more"))) == (
        "[request id: <id_unknown>] expected 2 inputs but got 3 inputs for model 'm'. Got input(s)"
        " ['more','INPUT1','INPUT0'], but missing required input(s) []. Please provide all required input(s)."
        " The model has no input 'more'; its inputs are: INPUT0, INPUT1"
    )


def test_a_limit_that_the_server_chose_names_the_way_out():
    chosen = replace(ADD_SUB, is_batch_size_chosen=True)
    assert error_of(chosen, request(ints("INPUT0", (9, 16)), ints("INPUT1", (9, 16)))).endswith(
        "batch-size must be <= 8 for 'm'; the server chose this limit: write a larger max_batch_size into config.pbtxt,"
        " or send fewer rows"
    )
    # A user who wrote no max_batch_size is not told about it.
    assert error_of(chosen, request(ints("INPUT0", (1, 15)), ints("INPUT1"))).endswith("Expected [-1,16], got [1,15]. ")

    # One row is sent as a batch of one.
    larger = replace(chosen, max_batch_size=16)
    assert error_of(larger, request(ints("INPUT0", (16,)), ints("INPUT1", (16,)))).endswith(
        "Expected [-1,16], got [16]. The first dimension is the batch: send [1,16]"
    )
    # Models of texts take a column, and people send a list.
    column = ModelConfig("m", inputs=(InputConfig("x", DataType.INT32, (1,)),), max_batch_size=8)
    column = replace(column, is_batch_size_chosen=True)
    for shape, send in (
        ((1,), "The first dimension is the batch: send [1,1]"),
        ((3,), "Each row has one value: send [3,1]"),
    ):
        assert error_of(column, request(ints("x", shape))).endswith(f"Expected [-1,1], got [{shape[0]}]. {send}")


@pytest.mark.parametrize(
    ("sent", "expected", "advice"),
    [
        ("FP64", DataType.FP32, "; numpy makes float64 by default: send array.astype('float32')"),
        ("INT64", DataType.INT32, "; numpy makes int64 by default: send array.astype('int32')"),
        ("INT64", DataType.FP16, "; numpy makes int64 by default: send array.astype('float16')"),
        ("FP64", DataType.BYTES, ""),
        ("FP64", DataType.BF16, ""),
        ("FP32", DataType.FP64, ""),
        ("INT32", DataType.FP32, ""),
    ],
)
def test_what_numpy_makes_by_default_is_refused_with_the_cast_that_helps(sent: str, expected: DataType, advice: str):
    config = ModelConfig("m", inputs=(InputConfig("x", expected, (1,)),))
    text = f"inference input 'x' data-type is '{sent}', but model 'm' expects '{expected.value}'{advice}"
    assert error_of(config, request(ints("x", (1,), sent))).endswith(text)


@pytest.mark.parametrize("shape", [(), (3,), (1, 0, 4)])
def test_an_input_of_unknown_rank_takes_any_shape(shape: tuple[int, ...]):
    config = ModelConfig("m", inputs=(InputConfig("x", DataType.INT32, (-1,), any_rank=True),))
    plan = RequestValidator(config).validate(request(ints("x", shape)))
    assert (plan.inputs[0].shape, plan.batch_size) == (shape, 1)
    assert "data-type is 'FP32'" in error_of(config, request(ints("x", shape, "FP32")))
    assert "got [3,-1]" in error_of(config, request(ints("x", (3, -1), size=0)))


def test_optional_inputs_and_reshape():
    config = ModelConfig(
        name="m",
        max_batch_size=4,
        inputs=(
            InputConfig("A", DataType.FP32, (1,), reshape=()),
            InputConfig("B", DataType.FP32, (2,), optional=True),
        ),
        outputs=(OutputConfig("O", DataType.FP32, (1,)),),
    )
    plan = RequestValidator(config).validate(request(ints("A", (2, 1), "FP32")))
    assert plan.inputs[0].shape == (2,)
    assert "between 1 and 2" in error_of(config, request())


def test_variable_dimensions_keep_their_order_in_a_reshape():
    assert reshape_dims((3, 5, 7), (-1, 5, -1), (1, -1, -1, 5)) == (1, 3, 7, 5)
