"""Which versions get room, which are unloaded for others, and which are unloaded because they are idle; with the tests'
own clock."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from rocserve.repository.residency.room import MODELS, Room, Stage
from rocserve.repository.residency.room import Tenant as RoomTenant

HOUR = 3600.0


class Tenant(RoomTenant):
    """A tenant whose requests the tests count."""

    in_flight = 0


@dataclass
class Host:
    """Loads and unloads immediately what the room decides."""

    room: Room[Tenant]
    now: float = 1000.0
    loaded: list[Tenant] = field(default_factory=list)
    refused: list[Tenant] = field(default_factory=list)

    def ask(self, *tenants: Tenant) -> None:
        for tenant in tenants:
            tenant.note_use(self.now)
            self.room.want(tenant)
        self.move()

    def move(self) -> None:
        while any(moves := self.room.moves(self.now)):
            load, unload, refuse = moves
            self.refused += refuse
            for tenant in load:
                self.loaded.append(tenant)
                self.room.loaded(tenant, tenant.needs)
            self.leave(unload)

    def leave(self, tenants: Sequence[Tenant]) -> None:
        for tenant in tenants:
            self.loaded.remove(tenant)
            self.room.remove(tenant)


def tenants(count: int, **needs: int) -> list[Tenant]:
    return [Tenant(needs) for _ in range(count)]


def test_the_least_popular_makes_room() -> None:
    host = Host(Room({MODELS: 2}))
    often, rare, new = tenants(3)
    for _ in range(3):
        host.ask(often)
    host.now += 10
    host.ask(rare)
    host.ask(new)
    assert host.loaded == [often, new], "used last, but less"
    host.now += HOUR
    host.ask(new)
    host.ask(rare)
    assert host.loaded == [new, rare], "what was popular an hour ago is not any more"


def test_who_has_requests_sequences_or_is_pinned_stays() -> None:
    host = Host(Room({MODELS: 3}))
    busy, held, pinned, new = *tenants(2), Tenant({}, is_pinned=True), Tenant({})
    host.ask(busy, held, pinned)
    busy.in_flight = 1
    held.held_until = host.now + 5
    host.ask(new)
    assert host.loaded == [busy, held, pinned]
    assert new.stage is Stage.WAITING
    host.now += 6
    host.move()
    assert host.loaded == [busy, pinned, new]


def test_nobody_goes_where_that_would_not_be_enough() -> None:
    host = Host(Room({"host": 10}))
    small, busy, large = Tenant({"host": 3}), Tenant({"host": 5}), Tenant({"host": 6})
    host.ask(small, busy)
    busy.in_flight = 1
    host.ask(large)
    assert host.loaded == [small, busy]
    busy.in_flight = 0
    host.move()
    assert host.loaded == [large]


def test_who_waits_is_not_overtaken() -> None:
    host = Host(Room({"host": 10}))
    first, large, small = Tenant({"host": 8}), Tenant({"host": 9}), Tenant({"host": 1})
    host.ask(first)
    first.in_flight = 1
    host.ask(large, small)
    assert host.loaded == [first], "there is room for the small one, but it came later"
    first.in_flight = 0
    host.move()
    assert host.loaded == [large, small]


def test_what_never_fits_is_refused_at_once_and_keeps_nobody() -> None:
    host = Host(Room({"host": 10}))
    pinned, large, small = Tenant({"host": 4}, is_pinned=True), Tenant({"host": 7}), Tenant({"host": 6})
    host.ask(pinned, large, small)
    assert host.refused == [large]
    assert large.stage is Stage.UNLOADED
    assert host.loaded == [pinned, small]


def test_memory_comes_back_when_its_owner_has_gone_and_a_place_before() -> None:
    for limits, count in (({MODELS: 1}, 1), ({"host": 1}, 0)):
        room = Room(limits)
        old, new = tenants(2, host=1)
        room.want(old)
        room.moves(0.0)
        room.loaded(old, old.needs)
        room.want(new)
        assert room.moves(0.0) == ([], [old], [])
        assert len(room.moves(0.0)[0]) == count


def test_what_is_retired_keeps_its_memory_and_gives_its_place() -> None:
    for pinned in (False, True):
        for limits, is_loaded in (({MODELS: 1}, True), ({"host": 1}, False)):
            room = Room(limits)
            old, new = tenants(2, host=1)
            old.is_pinned = pinned
            room.want(old)
            room.moves(0.0)
            room.loaded(old, old.needs)
            old.is_retired = True
            room.want(new)
            assert room.moves(0.0) == ([new] if is_loaded else [], [], [])
            room.remove(old)
            room.moves(0.0)
            assert new.stage is Stage.LOADING


def test_what_takes_more_than_was_thought_drives_others_out() -> None:
    host = Host(Room({"host": 10}))
    old, new = tenants(2, host=2)
    host.ask(old)
    host.now += 1
    host.ask(new)
    host.room.loaded(new, {"host": 9})
    host.move()
    assert host.loaded == [new]


def test_idle_ones_go_unasked() -> None:
    room = Room({})
    host = Host(room)
    short, always = Tenant({}, idle_seconds=10), Tenant({})
    host.ask(short, always)
    assert room.idle(host.now) == ([], host.now + 10)
    host.now += 10
    short.in_flight = 1
    going, again = room.idle(host.now)
    assert not going
    assert host.now < again < math.inf
    short.in_flight = 0
    assert room.idle(host.now)[0] == [short]
    assert short.stage is Stage.UNLOADING


@pytest.mark.parametrize("seed", range(5))
def test_all_who_ask_get_in_whatever_the_order(seed: int) -> None:
    dice = random.Random(seed)
    host = Host(Room({MODELS: 3, "host": 20}))
    everybody = [Tenant({"host": dice.randint(1, 12)}) for _ in range(20)]
    for _ in range(300):
        host.now += dice.random()
        asked = dice.choice(everybody)
        host.ask(asked)
        assert asked in host.loaded
        assert len(host.loaded) <= 3
        assert sum(tenant.needs["host"] for tenant in host.loaded) <= 20
