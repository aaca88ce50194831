"""Which dimensions must be equal, found by what a model takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rocserve.core.padding import Lengths, PaddedDimension, Padding
from rocserve.load_check.equal_lengths import equal_lengths

Takes = Callable[[Lengths], bool]


def dimensions(count: int, *sizes: int) -> Padding:
    return Padding(tuple(PaddedDimension(f"x:{index}", sizes, {"x": (index,)}) for index in range(count)))


@pytest.mark.parametrize(
    ("takes", "groups"),
    [
        (lambda a, b, c, d: True, [(0,), (1,), (2,), (3,)]),
        (lambda a, b, c, d: a == b, [(0, 1), (2,), (3,)]),
        (lambda a, b, c, d: a == b == c == d, [(0, 1, 2, 3)]),
        (lambda a, b, c, d: a == d and b == c, [(0, 3), (1, 2)]),
        (lambda a, b, c, d: a == c == d, [(0, 2, 3), (1,)]),
        # A length of 1 fits beside any other.
        (lambda a, b, c, d: 1 in (a, b) or a == b, [(0, 1), (2,), (3,)]),
        # What may only be shorter is not equal.
        (lambda a, b, c, d: b <= a and c == d, [(0,), (1,), (2, 3)]),
        # Heights and widths.
        (lambda a, b, c, d: a % 32 == b % 32 == 0 and c == d, [(0,), (1,), (2, 3)]),
        # A table of positions.
        (lambda a, b, c, d: a == b <= 13, [(0, 1), (2,), (3,)]),
        # One length only.
        (lambda a, b, c, d: a == b == 224, [(0,), (1,), (2,), (3,)]),
        (lambda a, b, c, d: a == 224 and c == d, [(0,), (1,), (2, 3)]),
    ],
)
def test_groups(takes: Callable[..., bool], groups: list[tuple[int, ...]]) -> None:
    assert equal_lengths(lambda lengths: takes(*lengths), dimensions(4)) == groups


def test_sizes_that_the_model_takes_alone() -> None:
    def takes(lengths: Lengths) -> bool:
        return lengths[0] == lengths[1] and set(lengths) <= {50, 75}

    assert equal_lengths(takes, dimensions(2)) is None
    assert equal_lengths(takes, dimensions(2, 75)) == [(0,), (1,)], "one length does not show it"
    assert equal_lengths(takes, dimensions(2, 50, 75)) == [(0, 1)]


def test_lengths_that_are_known_to_run() -> None:
    def takes(lengths: Lengths) -> bool:
        return lengths[0] == 2 * lengths[1]

    assert equal_lengths(takes, dimensions(2)) is None
    assert equal_lengths(takes, dimensions(2), known=(14, 7)) == [(0,), (1,)]


def test_many_dimensions_end() -> None:
    tried: list[Lengths] = []

    def takes(lengths: Lengths) -> bool:
        tried.append(lengths)
        return set(lengths) == {7}

    assert equal_lengths(takes, dimensions(12)) == [(index,) for index in range(12)]
    assert len(tried) < 12_000
