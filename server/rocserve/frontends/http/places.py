"""What a URL names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """All in plain form, not percent-encoded; empty what the URL does not have."""

    model: str = ""
    version: str = ""
    region: str = ""
    repository: str = ""
