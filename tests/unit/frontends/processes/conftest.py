"""The two ends of a link, and pauses in what they do."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from support.front_link import Ends

from rocserve.core.tensors import Buffer
from rocserve.frontends.processes import front_end, link_end
from rocserve.plane.heap import copy_in_steps


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


@pytest.fixture
def pause(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """When it is set, large inputs of requests and large answers are copied."""
    may_end = threading.Event()

    def copy(view: memoryview, start: int, data: Buffer) -> Iterator[None]:
        while not may_end.wait(0.001):
            yield
        yield from copy_in_steps(view, start, data)

    for module in (front_end, link_end):
        monkeypatch.setattr(module, "copy_in_steps", copy)
    yield may_end
    may_end.set()
