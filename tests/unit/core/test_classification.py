"""The classification extension."""

from __future__ import annotations

import numpy as np
import pytest

from rocserve.core.classification import classify
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.tensors import tensor_from_numpy


def test_the_highest_first_with_labels():
    tensor = tensor_from_numpy("P", np.array([[0.1, 0.7, 0.2], [0.5, 0.25, 0.25]], np.float32))
    ranked = classify(tensor, 2, ("zero", "one"), batching=True)
    assert ranked.datatype is DataType.BYTES
    assert ranked.shape == (2, 2)
    assert ranked.numpy().tolist() == [
        [b"0.700000:1:one", b"0.200000:2"],
        [b"0.500000:0:zero", b"0.250000:1:one"],
    ]


def test_more_classes_than_there_are_and_no_batching():
    tensor = tensor_from_numpy("P", np.array([3, 9], np.int64))
    ranked = classify(tensor, 5, (), batching=False)
    assert ranked.shape == (2,)
    assert ranked.numpy().tolist() == [b"9:1", b"3:0"]


@pytest.mark.parametrize(
    ("shape", "batching", "ranked"), [((0, 2), True, (0, 2)), ((2, 0), True, (2, 0)), ((0,), False, (0,))]
)
def test_nothing_has_no_classes(shape, batching, ranked):
    assert classify(tensor_from_numpy("P", np.zeros(shape, np.float32)), 5, (), batching).shape == ranked


def test_texts_have_no_rank():
    tensor = tensor_from_numpy("P", np.array([b"a"], np.object_))
    with pytest.raises(ServeError, match="class result not available for output due to unsupported type 'BYTES'"):
        classify(tensor, 1, (), batching=False)


def test_neither_more_values_nor_more_classes_than_others_can_wait_for():
    with pytest.raises(ServeError, match="with 1048577 values and 1 classes, at most 1048576 and 65536 can be"):
        classify(tensor_from_numpy("P", np.zeros((1 << 20) + 1, np.float32)), 1, (), batching=False)
    with pytest.raises(ServeError, match="with 131072 values and 131072 classes"):
        classify(tensor_from_numpy("P", np.zeros((2, 1 << 16), np.float32)), 1 << 16, (), batching=True)
