"""How many of the files that may be open are for connections."""

from __future__ import annotations

import resource

_KEPT_DESCRIPTORS = 256
"""For the server itself: workers take some, and so do files that are read."""


def most_descriptors() -> int | None:
    """None = any number."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if limit == resource.RLIM_INFINITY else limit - min(_KEPT_DESCRIPTORS, limit // 4)
