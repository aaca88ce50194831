"""Limits that all protocols share."""

from __future__ import annotations

import resource

LEAST_BYTES_PER_SECOND = 64 << 10
"""This many bytes of a message grant a second to send or to read it, so only a client slower than half a megabit per
second is late."""


def file_limit() -> int | None:
    """Return the limit of files that this process may have open; None = any number."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if limit == resource.RLIM_INFINITY else limit
