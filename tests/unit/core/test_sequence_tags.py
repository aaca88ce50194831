"""Names of sequences."""

from __future__ import annotations

import pytest

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.sequences import sequence_id


def test_names_are_at_most_128_bytes_long() -> None:
    assert sequence_id("s" * 128) == "s" * 128
    with pytest.raises(ServeError) as caught:
        sequence_id("s" * 129)
    assert caught.value.code is StatusCode.UNIMPLEMENTED
    assert caught.value.text == "string correlation ID cannot be longer than 128 characters"


def test_numbers_below_zero_are_those_of_the_same_bits() -> None:
    assert sequence_id(-1) == 2**64 - 1
