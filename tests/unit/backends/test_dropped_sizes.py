"""Sizes of 1 that a model has dropped from the shape of one row."""

from __future__ import annotations

import pytest

from rocserve.backends.dropped_sizes import with_dropped_sizes


@pytest.mark.parametrize(
    ("declared", "shape", "whole"),
    [
        ((-1, 3), (3,), (1, 3)),
        ((-1, -1, 3), (5, 3), (1, 5, 3)),
        ((-1, -1, 3), (3,), (1, 1, 3)),
        ((-1, 3, 1), (3,), (1, 3, 1)),
        ((-1,), (), (1,)),
        ((1, 4), (4,), (1, 4)),
        ((-1, 3), (1, 3), None),
        ((-1, 3), (4,), None),
        ((2, 3), (3,), None),
        ((-1, -1, -1), (5,), None),
        ((), (), None),
        ((-1,) * 40, (3,) * 20, None),
    ],
)
def test_the_only_shape_that_fits_is_found(
    declared: tuple[int, ...], shape: tuple[int, ...], whole: tuple[int, ...] | None
) -> None:
    assert with_dropped_sizes(declared, shape) == whole
