"""Numbers of bytes as people read them."""

from __future__ import annotations


def readable_size(count: int) -> str:
    """E.g. "512 B", "1.5 MiB", "12.00 GiB"."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.2f} GiB"
