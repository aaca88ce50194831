"""The data plane's loop, on which many parts run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest
from support.waiting import PATIENCE_SECONDS

from rocserve.plane.guest_loop import GuestLoop
from rocserve.plane.loop import PlaneLoop


@pytest.fixture
def plane() -> Iterator[PlaneLoop]:
    """A running loop."""
    plane = PlaneLoop(logging.getLogger("test"))
    plane.start()
    yield plane
    plane.stop()


@pytest.fixture
def guest(plane: PlaneLoop) -> Iterator[GuestLoop]:
    guest = GuestLoop(plane)
    yield guest
    closed = threading.Event()
    plane.call_soon(lambda: (guest.close(), closed.set()))
    assert closed.wait(PATIENCE_SECONDS)
