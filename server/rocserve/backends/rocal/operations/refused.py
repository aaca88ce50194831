"""Names of amd.rocal's fn that make no served operation, so that whoever writes one is told why."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rocserve.backends.rocal import schema

RANDOM_OPERATIONS = (
    "random_crop",
    "ssd_random_crop",
    "random_bbox_crop",
    "jitter",
    "snp_noise",
    "rain",
    "snow",
    "fog",
)
"""Those that draw random numbers for each image, whatever their keys are."""


def read_operation_name(names: Iterable[str]) -> Callable[[Any], str]:
    """Reads one of `names`."""
    read_known = schema.read_choice(*names)

    def read(value: Any) -> str:
        if isinstance(value, str) and value in RANDOM_OPERATIONS:
            raise ValueError("one that gives the same result every time, so none of rocAL's random ones")
        return read_known(value)

    return read
