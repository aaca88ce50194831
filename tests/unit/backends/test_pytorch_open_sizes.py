"""How sizes of a program's inputs go together; nothing here needs PyTorch."""

from __future__ import annotations

import numpy as np
import pytest

from rocserve.backends.pytorch.open_sizes import OpenSize, check_sizes
from rocserve.core.errors import ServeError, StatusCode

LENGTH = OpenSize("s", 1, 0, 3, 8)
TWICE_AND_ONE = OpenSize("s", 2, 1, 3, None)
INPUTS = (("x", (LENGTH, None)), ("y", (TWICE_AND_ONE,)))


@pytest.mark.parametrize("length", [3, 8])
def test_sizes_that_go_together(length: int) -> None:
    check_sizes(INPUTS, [np.zeros((length, 5)), np.zeros(2 * length + 1)])


@pytest.mark.parametrize(
    ("x", "y", "text"),
    [
        (2, 5, "dimension 0 of input 'x' is 2; its program was exported for 3 at least, at most 8"),
        (9, 19, "dimension 0 of input 'x' is 9; its program was exported for 3 at least, at most 8"),
        (4, 8, "dimension 0 of input 'y' is 8; its program was exported for 7 at least, in steps of 2"),
        (4, 11, "dimension 0 of input 'x' is 4, and dimension 0 of input 'y' is 11; its program was exported for sizes"
                " that go together"),
    ],
)  # fmt: skip
def test_sizes_that_do_not(x: int, y: int, text: str) -> None:
    with pytest.raises(ServeError) as raised:
        check_sizes(INPUTS, [np.zeros((x, 5)), np.zeros(y)])
    assert raised.value.code is StatusCode.INVALID_ARGUMENT and raised.value.text == text
