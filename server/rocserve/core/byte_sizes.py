"""Numbers of bytes as people read them."""

from __future__ import annotations

_UNITS = (("B", 0), ("KiB", 1), ("MiB", 1), ("GiB", 2))
"""With the decimals that each is written with."""


def readable_size(count: int) -> str:
    """E.g. "512 B", "1.5 MiB", "12.00 GiB", "1.25 TiB"."""
    amount = float(count)
    for unit, decimals in _UNITS:
        if amount < 1024:
            return f"{amount:.{decimals}f} {unit}"
        amount /= 1024
    return f"{amount:.2f} TiB"
