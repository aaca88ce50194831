"""Relations between the variable sizes of a program's inputs; nothing here needs PyTorch."""

from __future__ import annotations

import numpy as np
import pytest

from rocserve.backends.pytorch.open_sizes import OpenSize, SizeCondition, check_sizes
from rocserve.core.errors import ServeError, StatusCode

LENGTH = OpenSize("s", 1, 0, 3, 8)
TWICE_AND_ONE = OpenSize("s", 2, 1, 3, None)
NAMES, SIZES = ("x", "y"), ((LENGTH, None), (TWICE_AND_ONE,))


@pytest.mark.parametrize("length", [3, 8])
def test_sizes_that_go_together(length: int) -> None:
    check_sizes(NAMES, SIZES, (), [np.zeros((length, 5)), np.zeros(2 * length + 1)])


@pytest.mark.parametrize(
    ("x", "y", "text"),
    [
        (2, 5, "dimension 0 of input 'x' is 2; its program was exported for 3 at least, at most 8"),
        (9, 19, "dimension 0 of input 'x' is 9; its program was exported for 3 at least, at most 8"),
        (4, 8, "dimension 0 of input 'y' is 8; its program was exported for 7 at least, in steps of 2"),
        (4, 11, "dimension 0 of input 'x' is 4, but dimension 0 of input 'y' is 11; its program was exported for"
                " matching sizes"),
    ],
)  # fmt: skip
def test_sizes_that_do_not(x: int, y: int, text: str) -> None:
    with pytest.raises(ServeError) as raised:
        check_sizes(NAMES, SIZES, (), [np.zeros((x, 5)), np.zeros(y)])
    assert raised.value.code is StatusCode.INVALID_ARGUMENT and raised.value.text == text


@pytest.mark.parametrize(
    ("text", "sizes", "holds"),
    [
        ("size_0_0 == ((1 + size_1_0) // 2)", (3, 5), True),
        ("size_0_0 == ((1 + size_1_0) // 2)", (3, 4), False),
        ("size_0_0 <= size_1_0 and (size_1_0 % 8) == 0", (3, 16), True),
        ("size_0_0 <= size_1_0 and (size_1_0 % 8) == 0", (3, 12), False),
        ("max(size_0_0, 4) == size_1_0", (3, 4), True),
        ("size_0_0**2 == size_1_0", (3, 9), True),
        ("(size_0_0 // (size_1_0 - 1)) == 1", (3, 1), False),
    ],
)
def test_conditions(text: str, sizes: tuple[int, int], holds: bool) -> None:
    conditions, values = [SizeCondition(text)], [np.zeros(size) for size in sizes]
    if holds:
        check_sizes(NAMES, ((None,), (None,)), conditions, values)
        return
    with pytest.raises(ServeError, match="sizes of the inputs do not match; its program was exported for") as raised:
        check_sizes(NAMES, ((None,), (None,)), conditions, values)
    assert raised.value.code is StatusCode.INVALID_ARGUMENT
    assert f"dimension 0 of input 'x' ({sizes[0]})" in raised.value.text


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')", "size_0_0.bit_length() == 1", "size_0_0 == 9**9**9", "x == 1", "size_0_0 ==",
        "(" * 10_000 + "1", "size_0_0 == 1 " * 1000, "max() == size_0_0", "[size_0_0 for x in y]", "0.5 == size_0_0",
    ],
)  # fmt: skip
def test_what_is_no_condition(text: str) -> None:
    with pytest.raises(ValueError, match="condition"):
        SizeCondition(text)


def test_conditions_that_only_tell_0_and_1_apart() -> None:
    assert all(
        SizeCondition(text).excludes_only_0_and_1
        for text in ("size_0_0 != 1", "(size_0_0 // 2) >= 2", "2 <= size_0_0", "size_0_0 != 0")
    )
    assert not any(
        SizeCondition(text).excludes_only_0_and_1
        for text in ("size_0_0 >= 3", "(size_0_0 % 8) != 0", "size_0_0 != size_1_0", "size_0_0 == 1")
    )
