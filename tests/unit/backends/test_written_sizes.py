"""The parameters `sizes` and `padding`: which dimensions they name, and what is wrong with them."""

from __future__ import annotations

import pytest

from rocserve.backends.written_sizes import half_steps, other_size, written_padding
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import InputConfig, ModelConfig, SequenceBatching, SequenceState
from rocserve.core.padding import PaddedDimension
from rocserve.core.requests import Signature, TensorSpec

ENCODER = Signature(
    (
        TensorSpec("input_ids", DataType.INT64, (-1, -1), dimension_names=("batch", "sequence")),
        TensorSpec("attention_mask", DataType.INT64, (-1, -1), dimension_names=("batch", "sequence")),
        TensorSpec("image", DataType.UINT8, (-1, 3, -1, -1), dimension_names=("batch", "", "", "batch")),
        TensorSpec("texts", DataType.BYTES, (-1, -1), dimension_names=("batch", "words")),
    ),
    (
        TensorSpec("tokens", DataType.FP32, (-1, -1, 4), dimension_names=("batch", "sequence", "")),
        TensorSpec("scores", DataType.FP32, (-1, 2, -1), dimension_names=("batch", "", "sequence")),
        TensorSpec("pooled", DataType.FP32, (-1, 4), dimension_names=("batch", "")),
    ),
    True,
)


def config(sizes: str, padding: str = "", max_batch_size: int = 8, **more) -> ModelConfig:
    return ModelConfig("m", max_batch_size=max_batch_size, parameters={"sizes": sizes, "padding": padding}, **more)


def refusal(settings: ModelConfig, signature: Signature = ENCODER) -> str:
    with pytest.raises(ServeError) as caught:
        written_padding(settings, signature)
    assert caught.value.code is StatusCode.INVALID_ARGUMENT
    return caught.value.text


def test_equal_names_are_one_dimension() -> None:
    (found,) = written_padding(config(" sequence = 32, 8,16 ;"), ENCODER).dimensions
    inputs = {"input_ids": (1,), "attention_mask": (1,)}
    assert found == PaddedDimension("sequence", (8, 16, 32), inputs, {"tokens": (1,), "scores": (2,)})


def test_a_dimension_without_a_name_is_called_by_its_input() -> None:
    (found,) = written_padding(config("image:1=200"), ENCODER).dimensions
    assert found == PaddedDimension("image:1", (200,), {"image": (2,)}), "the batch does not count"


def test_dimensions_that_are_named_together_are_one() -> None:
    (found,) = written_padding(config("image:1, sequence=8,16"), ENCODER).dimensions
    inputs = {"image": (2,), "input_ids": (1,), "attention_mask": (1,)}
    assert found == PaddedDimension("image:1,sequence", (8, 16), inputs, {"tokens": (1,), "scores": (2,)})


def test_a_comma_in_a_name_does_not_separate() -> None:
    signature = Signature((TensorSpec("x", DataType.FP32, (-1, -1), dimension_names=("b", "max(a, c)")),), (), True)
    assert [one.label for one in written_padding(config("max(a, c)=8"), signature).dimensions] == ["max(a, c)"]


def test_without_rows_all_dimensions_count() -> None:
    whole = ModelConfig("m", is_batch_size_written=True, parameters={"sizes": "x:0=4; x:1=8"})
    signature = Signature((TensorSpec("x", DataType.FP32, (-1, -1)),), (), True)
    assert [one.inputs for one in written_padding(whole, signature).dimensions] == [{"x": (0,)}, {"x": (1,)}]


def test_rows_are_known_before_the_configuration_is_complete() -> None:
    open_batch = ModelConfig("m", parameters={"sizes": "x:0=8"})
    signature = Signature((TensorSpec("x", DataType.FP32, (-1, -1)),), (), True)
    assert [one.inputs for one in written_padding(open_batch, signature).dimensions] == [{"x": (1,)}]


def test_nothing_is_padded_unless_it_is_written() -> None:
    assert not written_padding(config(""), ENCODER).dimensions


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ("sequense=8", "names the dimension 'sequense', which the model does not have, or which is not open"),
        ("batch=8", "its open dimensions are: image:1, sequence, words"),
        ("sequence", "must be as in \"sequence=16,32,64; IMAGE:1=224,320\", not 'sequence'"),
        ("=8", "not '=8'"),
        ("sequence=8; sequence=16", "names the dimension 'sequence' twice"),
        ("sequence,image:1=8; image:1=8", "names the dimension 'image:1' twice"),
        ("sequence, =8", "not 'sequence, =8'"),
        ("sequence=0", "must be at most 64 whole numbers from 1 on"),
        ("sequence=a", "dimension 'sequence' in parameter 'sizes' of model 'm' must be"),
        ("words=8", "names the dimension 'words' of texts, which cannot be padded"),
    ],
)
def test_faults_of_sizes(sizes: str, text: str) -> None:
    assert text in refusal(config(sizes))


def test_a_size_that_the_configuration_fixes_is_not_open() -> None:
    fixed = config("sequence=8", inputs=(InputConfig("input_ids", DataType.INT64, (128,)),))
    (found,) = written_padding(fixed, ENCODER).dimensions
    assert found.inputs == {"attention_mask": (1,)}


def test_ragged_batches_are_not_padded_too() -> None:
    ragged = config("sequence=8", inputs=(InputConfig("input_ids", DataType.INT64, (-1,), allow_ragged_batch=True),))
    assert "join them without padding; remove one or the other" in refusal(ragged)


def test_the_states_of_a_sequence_keep_their_sizes() -> None:
    states = (SequenceState("attention_mask", "tokens", DataType.INT64, (-1,)),)
    text = refusal(config("sequence=8", sequence_batching=SequenceBatching(states=states)))
    assert "its open dimensions are: image:1, words" in text


@pytest.mark.parametrize(
    ("padding", "values"),
    [
        ("", {}),
        ("1", {"input_ids": 1.0}),
        ("attention_mask=1", {"attention_mask": 1.0}),
        ("input_ids=5; 2; attention_mask = -3", {"input_ids": 5.0, "attention_mask": -3.0}),
    ],
)
def test_masks_are_filled_with_zeros_unless_they_are_named(padding: str, values: dict[str, float]) -> None:
    assert written_padding(config("sequence=8", padding), ENCODER).values == values


@pytest.mark.parametrize(
    ("padding", "text"),
    [
        ("image=1", "names the input 'image', which is not padded; the padded inputs are: attention_mask, input_ids"),
        ("1.5", "must be numbers that INT64 holds for input 'input_ids', not '1.5'"),
        ("input_ids=nan", "not 'nan'"),
        ("input_ids=1e300", "not '1e300'"),
        ("x", "not 'x'"),
    ],
)
def test_faults_of_padding(padding: str, text: str) -> None:
    assert text in refusal(config("sequence=8", padding))


@pytest.mark.parametrize(
    ("datatype", "text", "fits"),
    [("BOOL", "1", True), ("BOOL", "2", False), ("UINT8", "-1", False), ("FP16", "-inf", True), ("BF16", "0.5", True)],
)
def test_values_by_datatype(datatype: str, text: str, fits: bool) -> None:
    signature = Signature((TensorSpec("x", DataType(datatype), (-1, -1)),), (), True)
    if fits:
        assert written_padding(config("x:0=8", text), signature).values == {"x": float(text)}
    else:
        assert f"numbers that {datatype} holds" in refusal(config("x:0=8", text), signature)


@pytest.mark.parametrize(
    ("least", "most", "sizes"),
    [
        (0, 512, (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)),
        (20, 100, (24, 32, 48, 64, 96, 100)),
        (2, 10, (10,)),
        (0, 77, (16, 24, 32, 48, 64, 77)),
        (0, 16, (16,)),
    ],
)
def test_half_steps(least: int, most: int, sizes: tuple[int, ...]) -> None:
    assert half_steps(most, least) == sizes


@pytest.mark.parametrize(("sizes", "other"), [((8, 16), 16), ((512,), 511), ((1,), 2)])
def test_a_model_is_not_tried_at_sizes_above_the_largest(sizes: tuple[int, ...], other: int) -> None:
    assert other_size(PaddedDimension("length", sizes, {})) == other
