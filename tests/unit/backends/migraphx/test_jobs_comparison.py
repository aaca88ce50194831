"""How far results are apart, and the inputs that make them."""

from __future__ import annotations

import numpy as np
import pytest

from rocserve.backends.migraphx.binding.interface import DimensionRange, ProgramTensor
from rocserve.backends.migraphx.jobs.compile import distance
from rocserve.backends.migraphx.jobs.probe import Samples
from rocserve.core.errors import ServeError


def test_floats_are_apart_by_their_relative_error() -> None:
    expected = np.array([3.0, 4.0], np.float32)
    assert distance(expected, expected, "float") == 0
    assert distance(expected + np.array([0, 0.5], np.float32), expected, "float") == pytest.approx(0.1, rel=1e-3)
    assert distance(np.zeros(2, np.float32), np.zeros(2, np.float32), "float") == 0
    assert distance(expected[:1], expected, "float") == np.inf


def test_bf16_is_compared_by_its_values() -> None:
    def bits(*values: float) -> np.ndarray:
        return (np.array(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)

    assert distance(bits(2.0, 0.0), bits(1.0, 0.0), "bf16") == pytest.approx(1.0, rel=1e-3)


def test_what_is_no_number_must_be_so_in_both() -> None:
    expected = np.array([1.0, np.nan, np.inf], np.float32)
    assert distance(np.array([1.1, np.nan, np.inf], np.float32), expected, "float") == pytest.approx(0.1, rel=1e-3)
    assert distance(np.array([1.0, np.nan, -np.inf], np.float32), expected, "float") == np.inf
    assert distance(np.array([np.nan, np.nan, np.inf], np.float32), expected, "float") == np.inf


def test_integers_are_apart_by_the_share_that_differs() -> None:
    assert distance(np.array([1, 2, 3, 4]), np.array([1, 2, 3, 5]), "int64") == 0.25
    assert distance(np.array([True, False]), np.array([False, True]), "bool") == 1


@pytest.mark.parametrize(
    ("datatype", "least", "most"),
    [("float", 0, 1), ("half", 0, 1), ("double", 0, 1), ("int64", 0, 1), ("uint8", 0, 1), ("bool", 0, 1)],
)
def test_samples_are_values_that_a_graph_can_take(datatype: str, least: int, most: int) -> None:
    samples = Samples()
    tensors = {"x": ProgramTensor("x", datatype, (4, 50))}
    values, others = samples.inputs(tensors)["x"], samples.inputs(tensors)["x"]
    assert values.shape == (4, 50)
    assert values.min() >= least
    assert values.max() <= most
    assert len(np.unique(values)) > 1
    assert not np.array_equal(values, others)
    assert np.array_equal(values, Samples().inputs(tensors)["x"])


def test_samples_of_floats_without_a_numpy_type_are_their_bits() -> None:
    tensors = {name: ProgramTensor(name, name, (200,)) for name in ("bf16", "fp8e4m3fn", "fp8e5m2")}
    made = Samples().inputs(tensors)
    bf16 = (made["bf16"].astype(np.uint32) << 16).view(np.float32)
    assert made["bf16"].dtype == np.uint16
    assert bf16.min() >= 0
    assert bf16.max() <= 1
    assert made["fp8e4m3fn"].min() == 0x30  # 0.5
    assert made["fp8e4m3fn"].max() == 0x38  # 1
    assert made["fp8e5m2"].max() == 0x3C


def test_samples_take_the_most_of_a_range_or_the_rows_that_are_asked_for() -> None:
    tensors = {"x": ProgramTensor("x", "float", (DimensionRange(1, 6), 3))}
    assert Samples().inputs(tensors)["x"].shape == (6, 3)
    assert Samples().inputs(tensors, 2)["x"].shape == (2, 3)


def test_a_datatype_that_no_array_holds_is_refused() -> None:
    with pytest.raises(ServeError, match="an input is of MIGraphX's type tuple, which no request can bring"):
        Samples().inputs({"x": ProgramTensor("x", "tuple", (1,))})
