from __future__ import annotations

import numpy as np
import pytest

from rocserve_tools.measuring.figures import difference


def test_equal() -> None:
    values = np.array([[1.0, np.inf, np.nan], [0.0, -2.0, 3.0]])
    found = difference([values], [values.copy()])
    assert (found.largest, found.mean, found.relative, found.cosine, found.top1) == (0.0, 0.0, 0.0, 1.0, 1.0)


def test_figures() -> None:
    reference = np.array([[3.0, 4.0], [0.0, 5.0]], np.float32)
    result = np.array([[4.5, 4.0], [0.0, 5.0]], np.float32)
    found = difference([result], [reference])
    assert found.largest == pytest.approx(1.5)
    assert found.mean == pytest.approx(1.5 / 4)
    assert found.relative == pytest.approx(1.5 / np.sqrt(50))
    assert found.cosine == pytest.approx((13.5 + 16 + 25) / np.sqrt((20.25 + 16 + 25) * 50))
    assert found.top1 == pytest.approx(0.5)


def test_over_several_samples_and_narrow_rows() -> None:
    ones = np.ones((2, 1), np.float16)
    found = difference([ones, ones + 1], [ones, ones])
    assert (found.largest, found.mean, found.top1) == (1.0, 0.5, None)


def test_infinity_on_one_side_only() -> None:
    found = difference([np.array([[1.0, np.nan]])], [np.array([[1.0, 2.0]])])
    assert found.largest == float("inf")
    assert np.isnan(found.cosine)
