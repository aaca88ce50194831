"""Buckets: which lengths a request has, to which sizes it is filled up, and the facts that its plan and its client
get."""

from __future__ import annotations

import pytest

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import InputConfig, ModelConfig, OutputConfig
from rocserve.core.padding import ABSENT, Buckets, PaddedDimension, Padding, largest
from rocserve.core.requests import InputHead, RequestHead, RequestPlan
from rocserve.core.validation import RequestValidator

SEQUENCE = PaddedDimension("sequence", (8, 16, 32), {"ids": (1,), "mask": (1,), "pairs": (1, 2)}, {"tokens": (1,)})
HEIGHT = PaddedDimension("H", (100, 200), {"image": (2,)})
BUCKETS = Buckets(Padding((SEQUENCE, HEIGHT)))


@pytest.mark.parametrize(("length", "size"), [(1, 8), (8, 8), (9, 16), (31, 32), (32, 32)])
def test_a_length_is_filled_up_to_the_next_size(length: int, size: int) -> None:
    assert BUCKETS.sizes_for((length, ABSENT)) == (size, ABSENT)


def test_an_engine_that_takes_other_lengths_gets_them_as_they_are() -> None:
    open_above = PaddedDimension("sequence", (8, 16), {"ids": (1,)}, takes_others=True)
    assert [open_above.size_for(length) for length in (0, 5, 16, 17, 900)] == [0, 8, 16, 17, 900]


def test_places_of_one_label_have_one_length() -> None:
    shapes = [("ids", (2, 5)), ("pairs", (2, 5, 5)), ("image", (2, 3, 90, 64))]
    assert BUCKETS.lengths(shapes) == (5, 90)
    with pytest.raises(ValueError, match="dimension 'sequence' is 5 in input 'ids' and 6 in input 'mask'; both must"):
        BUCKETS.lengths([("ids", (2, 5)), ("mask", (2, 6))])
    with pytest.raises(ValueError, match="is 5 in input 'pairs' and 7 in input 'pairs'"):
        BUCKETS.lengths([("pairs", (2, 5, 7))])


@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        ((33, 1), r"dimension 'sequence' .* is 33, expected 1 to 32, the largest of its sizes 8, 16, 32; send less"),
        ((0, 1), "is 0, expected 1 to 32"),
        ((1, 201), "dimension 'H' of input 'image' is 201, expected 1 to 200"),
    ],
)
def test_a_length_without_a_size(lengths: tuple[int, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        BUCKETS.sizes_for(lengths)


def test_shapes_in_a_bucket() -> None:
    sizes = (16, 200)
    assert BUCKETS.padded_shape("pairs", (2, 9, 9), sizes) == (2, 16, 16)
    assert BUCKETS.padded_shape("image", (2, 3, 101, 64), sizes) == (2, 3, 200, 64)
    assert BUCKETS.padded_shape("other", (2, 9), sizes) == (2, 9)
    assert BUCKETS.shared_shape("image", (2, 3, 101, 64)) == (2, 3, -1, 64), "what is not padded must be equal"


def test_a_batch_is_as_long_as_its_longest_requests() -> None:
    assert largest([(3, ABSENT), (7, ABSENT)]) == (7, ABSENT)
    assert largest([(3, 90), (7, 20)]) == (7, 90)
    padded = BUCKETS.padded_outputs([(3, 90), (7, 20)], (8, 100))["tokens"]
    assert (padded.sizes, padded.lengths) == ({1: 8}, [{1: 3}, {1: 7}])


MODEL = ModelConfig(
    "m",
    max_batch_size=8,
    inputs=(
        InputConfig("ids", DataType.INT64, (-1,)),
        InputConfig("mask", DataType.INT64, (-1,), optional=True),
        InputConfig("scale", DataType.FP32, (-1,)),
    ),
    outputs=(OutputConfig("tokens", DataType.FP32, (-1, 4)),),
)
VALIDATOR = RequestValidator(MODEL, padding=Padding((SEQUENCE,)))


def planned(rows: int, length: int, scales: int = 1, **more: int) -> RequestPlan:
    heads = [InputHead("ids", "INT64", (rows, length)), InputHead("scale", "FP32", (rows, scales))]
    heads += [InputHead(name, "INT64", (rows, size)) for name, size in more.items()]
    return VALIDATOR.plan(RequestHead("m", "", tuple(heads)), "")


def test_requests_of_one_bucket_share_a_batch() -> None:
    short, longer, longest = planned(1, 9), planned(3, 16), planned(1, 17)
    assert short.bucket is longer.bucket is not longest.bucket
    assert short.batch_key == longer.batch_key == longest.batch_key, "a larger bucket holds all of them"
    assert planned(1, 9, scales=2).bucket is not short.bucket, "what is not padded must be equal"
    assert planned(1, 9, mask=9).batch_key != short.batch_key


def test_a_plan_counts_what_is_padded() -> None:
    plan = planned(3, 9, mask=9)
    assert plan.bucket is not None
    assert (plan.real_elements, plan.bucket.row_elements, plan.bucket.row_work) == (54, 32, 2)
    assert (plan.work, planned(2, 1).work, planned(1, 32).work) == (6, 2, 4), "rows of the smallest bucket"


def test_the_error_says_what_is_expected() -> None:
    with pytest.raises(ServeError) as refused:
        VALIDATOR.plan(
            RequestHead("m", "", (InputHead("ids", "INT64", (1, 40)), InputHead("scale", "FP32", (1, 1)))), ""
        )
    assert refused.value.code is StatusCode.INVALID_ARGUMENT
    assert refused.value.text == (
        "dimension 'sequence' of input 'ids', 'mask', 'pairs' is 40, expected 1 to 32, the largest of its sizes 8, 16,"
        " 32; send less, or write larger sizes into config.pbtxt (parameter 'sizes') (model 'm')"
    )
