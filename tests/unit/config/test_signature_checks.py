from __future__ import annotations

from collections.abc import Callable

import pytest

from rocserve.config.pbtxt import parse_model_config
from rocserve.config.signature_checks import check_signature
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.requests import Signature

MakeSignature = Callable[..., Signature]
_OUTPUT = 'output { name: "y" data_type: TYPE_FP32 dims: 2 }'


@pytest.fixture
def batching(make_signature: MakeSignature) -> Signature:
    return make_signature({"x": ("FP32", (-1, 4)), "w": ("INT32", (-1, -1, 3))}, {"y": ("FP32", (-1, 2))})


def _config(inputs: str, outputs: str = _OUTPUT, max_batch_size: int = 8) -> str:
    return f'name: "m" max_batch_size: {max_batch_size} {inputs} {outputs}'


_X = 'input { name: "x" data_type: TYPE_FP32 dims: 4 }'
_W = 'input { name: "w" data_type: TYPE_INT32 dims: [7, 3] }'


def _check(text: str, signature: Signature) -> tuple[str, ...]:
    return check_signature(parse_model_config(text, "config.pbtxt"), signature)


def _fault(text: str, signature: Signature) -> str:
    with pytest.raises(ServeError) as raised:
        _check(text, signature)
    assert raised.value.code is StatusCode.INVALID_ARGUMENT
    return raised.value.text


def test_fixed_dims_where_the_model_takes_any(batching: Signature) -> None:
    assert _check(_config(_X + _W), batching) == ()


def test_missing_input(batching: Signature) -> None:
    assert _fault(_config(_X), batching) == (
        "unable to load model 'm', configuration expects 1 inputs, model provides 2; missing: w"
    )


def test_too_many_inputs(batching: Signature) -> None:
    extra = 'input { name: "v" data_type: TYPE_FP32 dims: 4 }'
    assert _fault(_config(_X + _W + extra), batching) == (
        "unable to load model 'm', configuration expects 3 inputs, model provides 2"
    )


def test_unknown_input_and_output(batching: Signature) -> None:
    assert _fault(_config(_X + _W.replace('"w"', '"v"')), batching) == (
        "unexpected inference input 'v', allowed inputs are: w, x (unable to load model 'm')"
    )
    assert _fault(_config(_X + _W, _OUTPUT.replace('"y"', '"u"')), batching) == (
        "unexpected inference output 'u', allowed outputs are: y (unable to load model 'm')"
    )


def test_datatype(batching: Signature) -> None:
    assert _fault(_config(_X.replace("FP32", "STRING") + _W), batching) == (
        "unable to load model 'm', configuration expects datatype TYPE_STRING for input 'x', model provides TYPE_FP32"
    )
    assert _fault(_config(_X + _W, _OUTPUT.replace("FP32", "FP16")), batching) == (
        "unable to load model 'm', configuration expects datatype TYPE_FP16 for output 'y', model provides TYPE_FP32"
    )


def test_dims_of_a_batching_model(batching: Signature) -> None:
    assert _fault(_config(_X.replace("dims: 4", "dims: [-1, 4]") + _W), batching) == (
        "model 'm', tensor 'x': the model expects 2 dimensions (shape [-1,4]) but the model configuration specifies 3"
        " dimensions (an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape,"
        " making complete shape [-1,-1,4])"
    )


def test_the_dimension_that_differs_is_named(batching: Signature) -> None:
    assert _fault(_config(_X.replace("dims: 4", "dims: 5") + _W), batching).endswith(
        "2 dimensions (an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape,"
        " making complete shape [-1,5]); dimension 1 is 4 in the model, 5 in the configuration"
    )


def test_one_value_for_each_row_needs_a_reshape(make_signature: MakeSignature) -> None:
    signature = make_signature({"x": ("FP32", (-1, 4))}, {"y": ("FP32", (-1,))}, batching=True)
    output = _OUTPUT.replace("dims: 2", "dims: 1")
    assert _fault(_config(_X, output), signature).endswith(
        "; the model has one value for each row: write dims: [ 1 ] and reshape { shape: [ ] }"
    )
    assert _check(_config(_X, output.replace("dims: 1", "dims: [ 1 ] reshape { shape: [ ] }")), signature) == ()


def test_variable_dims_where_the_model_is_fixed(batching: Signature) -> None:
    assert "the model expects 2 dimensions (shape [-1,4])" in _fault(
        _config(_X.replace("dims: 4", "dims: -1") + _W), batching
    )


def test_model_whose_first_dimension_is_fixed(make_signature: MakeSignature) -> None:
    signature = make_signature({"x": ("FP32", (1, 4))}, {"y": ("FP32", (1, 2))})
    assert _fault(_config(_X), signature) == (
        "model 'm', tensor 'x': for the model to support batching the shape should have at least 1 dimension and the"
        " first dimension must be -1; but shape expected by the model is [1,4]"
    )


def test_dims_without_batching(make_signature: MakeSignature) -> None:
    signature = make_signature({"x": ("FP32", (2, 4))}, {"y": ("FP32", (2,))})
    assert _fault(_config(_X, max_batch_size=0), signature) == (
        "model 'm', tensor 'x': the model expects 2 dimensions (shape [2,4]) but the model configuration specifies 1"
        " dimensions (shape [4])"
    )


def test_forgotten_batch_size_is_pointed_out(make_signature: MakeSignature) -> None:
    signature = make_signature({"x": ("FP32", (-1, 4))}, {"y": ("FP32", (-1, 2))})
    assert _fault(_config(_X, max_batch_size=0), signature).endswith(
        "(shape [4]); set max_batch_size above 0 to batch, or write the whole shape into dims"
    )


def test_reshape_is_what_the_model_sees(make_signature: MakeSignature) -> None:
    signature = make_signature({"x": ("FP32", (-1, 2, 2))}, {"y": ("FP32", (-1, 2))})
    assert _check(_config(_X.replace("dims: 4", "dims: 4 reshape { shape: [2, 2] }")), signature) == ()
    assert "tensor 'x'" in _fault(_config(_X), signature)


def test_scalars(make_signature: MakeSignature) -> None:
    signature = make_signature({"x": ("FP32", ())}, {"y": ("FP32", (2,))})
    assert _check(_config(_X.replace("dims: 4", "dims: [1, 1]"), max_batch_size=0), signature) == ()
    assert _fault(_config(_X, max_batch_size=0), signature) == (
        "unable to load model 'm', scalar tensor 'x', should only provide 1 in the model configuration when the model"
        " doesn't support batching. Model configuration provided: [4]."
    )


def test_optional_inputs_of_the_model_may_be_left_out(make_signature: MakeSignature) -> None:
    signature = make_signature(
        {"x": ("FP32", (-1, 4)), "bias": ("FP32", (-1, 1))}, {"y": ("FP32", (-1, 2))}, optional=("bias",)
    )
    assert _check(_config(_X), signature) == ()


def test_input_that_only_the_configuration_calls_optional(make_signature: MakeSignature) -> None:
    signature = make_signature({"x": ("FP32", (-1, 4))}, {"y": ("FP32", (-1, 2))})
    (warning,) = _check(_config(_X.replace("dims: 4", "dims: 4 optional: true")), signature)
    assert "input 'x' is optional in the configuration, but the model needs it" in warning
