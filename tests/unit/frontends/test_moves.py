"""What happens in which order when front ends come and go: also if they cannot, or if the kernel has no filters."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.waiting import until

from rocserve.frontends.demand import Demand, Pace
from rocserve.frontends.moves import Moves

PACE = Pace(busy_seconds=0.01, quiet_seconds=0.01, sample_seconds=0.001)


@dataclass
class Parts:
    """Stands for the ports, the transports of this process, and the front ends; its loop works without a pause."""

    done: list[str] = field(default_factory=list)
    failures: int = 0
    """How often the front ends cannot be started yet."""
    count: int = 2
    in_flight: int = 2

    @property
    def worked_seconds(self) -> float:
        return asyncio.get_running_loop().time()

    def give_to_all(self) -> None:
        self.done.append("all")

    def give_to_others(self, count: int) -> None:
        self.done.append(f"others {count}")

    def give_to_this_process(self) -> None:
        self.done.append("this process")

    def close_after_answers(self, closes: bool = True) -> None:
        self.done.append("close" if closes else "keep")

    async def start(self) -> None:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("no process can be started")
        self.done.append("start")

    def retire(self) -> None:
        self.done.append("retire")


def moves_of(parts: Any, has_filters: bool = True) -> asyncio.Task[None]:
    log = logging.getLogger("rocserve.test")
    return asyncio.create_task(Moves(Demand(PACE), parts, parts, parts, has_filters, lambda: parts, log).run())


async def test_front_ends_come_listen_and_get_the_connections() -> None:
    parts = Parts()
    moving = moves_of(parts)
    await until(lambda: parts.done == ["all", "start", "others 2", "close"])
    parts.in_flight = 0
    await until(lambda: parts.done[4:] == ["keep", "this process", "retire"])
    parts.in_flight = 2
    await until(lambda: parts.done[7:] == ["all", "start", "others 2", "close"])
    moving.cancel()


async def test_front_ends_that_cannot_be_started_are_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    parts = Parts(failures=1)
    moving = moves_of(parts)
    await until(lambda: parts.done == ["all", "this process", "all", "start", "others 2", "close"])
    assert "front ends cannot be started, so the server's process serves all clients: no process" in caplog.text
    moving.cancel()


async def test_without_filters_they_stay() -> None:
    parts = Parts()
    moving = moves_of(parts, has_filters=False)
    await until(moving.done)
    assert parts.done == ["start", "close"]
