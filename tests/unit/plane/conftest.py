"""A loop that runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from rocserve.plane.loop import PlaneLoop


@pytest.fixture
def plane() -> Iterator[PlaneLoop]:
    plane = PlaneLoop(logging.getLogger("test"))
    plane.start()
    yield plane
    plane.stop()
