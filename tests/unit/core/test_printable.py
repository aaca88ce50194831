"""Numbers of bytes as people read them."""

from __future__ import annotations

import pytest

from rocserve.core.printable import readable_size


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (5 << 20, "5.0 MiB"),
        (12 << 30, "12.00 GiB"),
        (5 << 38, "1.25 TiB"),
        (3 << 52, "12288.00 TiB"),
    ],
)
def test_sizes(count: int, text: str) -> None:
    assert readable_size(count) == text
