"""Room decides which of the registered versions are loaded: who gets room, who makes it, and who goes idle.

Tenants that want room wait in a queue, first come, first served: a large model is not overtaken by small ones for ever.
Who makes room is the least popular of those that are idle: popularity is the number of requests, of which one that came
a half-life ago counts half. What cannot be loaded even if all went that may go is refused at once.

Times are seconds of any steady clock.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

_HALF_LIFE_SECONDS = 300.0
"""Long enough that a burst on many rare models does not drive out those that are asked for all day."""

MODELS = "loaded versions"
"""Besides bytes of the host and of GPUs, a thing of which there is only so much."""


class Stage(enum.Enum):
    OUT = "out"
    WAITING = "waiting"
    """For room."""
    LOADING = "loading"
    LOADED = "loaded"
    LEAVING = "leaving"


@dataclass(slots=True, eq=False)
class Tenant:
    """A registered version. The data plane's thread notes its use, all else is the asyncio loop's."""

    needs: Mapping[str, int]
    """Bytes, by place: an estimate until it has been loaded once."""
    is_pinned: bool = False
    """It makes no room, and goes only with its model."""
    idle_seconds: float = math.inf
    """It goes when it was not used for this long."""
    stage: Stage = Stage.OUT
    used_at: float = 0.0
    held_until: float = 0.0
    """Its sequences may go on until then."""
    in_flight: int = 0
    """Requests that wait, run, or are being answered."""
    popularity: float = -math.inf
    """The logarithm of what each use adds: twice as much as one a half-life before. So it never has to be aged."""

    def note_use(self, now: float) -> None:
        added = now / _HALF_LIFE_SECONDS
        low, high = sorted((added, self.popularity))
        self.used_at, self.popularity = now, high + math.log2(1.0 + 2.0 ** (low - high))

    def is_idle(self, now: float) -> bool:
        return not self.in_flight and self.held_until <= now

    def may_go(self, now: float) -> bool:
        return self.stage is Stage.LOADED and not self.is_pinned and self.is_idle(now)


AnyTenant = TypeVar("AnyTenant", bound=Tenant)


@dataclass(frozen=True, slots=True)
class Moves(Generic[AnyTenant]):
    """What to do now."""

    load: list[AnyTenant] = field(default_factory=list)
    unload: list[AnyTenant] = field(default_factory=list)
    refuse: list[AnyTenant] = field(default_factory=list)
    """There will never be room for these."""


class Room(Generic[AnyTenant]):
    """Keeps account of all tenants; its owner loads and unloads them, and says when that has ended."""

    def __init__(self, limits: Mapping[str, int]) -> None:
        """`limits`: by place, and for MODELS; what has none is not limited."""
        self._limits = limits
        self._queue: deque[AnyTenant] = deque()
        self._inside: dict[AnyTenant, None] = {}
        """Those that take room."""

    @property
    def has_waiting(self) -> bool:
        return bool(self._queue)

    def want(self, tenant: AnyTenant) -> None:
        """Load it as soon as there is room."""
        if tenant.stage is Stage.OUT:
            tenant.stage = Stage.WAITING
            self._queue.append(tenant)

    def withdraw(self, tenant: AnyTenant) -> None:
        """It is wanted no more, unless it is being loaded already."""
        if tenant.stage is Stage.WAITING:
            self._queue.remove(tenant)
            tenant.stage = Stage.OUT

    def loaded(self, tenant: AnyTenant, needs: Mapping[str, int]) -> None:
        """It has been loaded, and takes this much."""
        tenant.stage, tenant.needs = Stage.LOADED, needs

    def stays(self, tenant: AnyTenant) -> None:
        """It was to go, but has got a request."""
        tenant.stage = Stage.LOADED

    def left(self, tenant: AnyTenant) -> None:
        """It has gone, or was not loaded after all."""
        self.withdraw(tenant)
        self._inside.pop(tenant, None)
        tenant.stage = Stage.OUT

    def moves(self, now: float) -> Moves[AnyTenant]:
        """What to do for those that wait, and where more is taken than there is."""
        moves: Moves[AnyTenant] = Moves()
        while self._queue:
            first = self._queue[0]
            if self._short(first, [tenant for tenant in self._inside if tenant.is_pinned]):
                moves.refuse.append(first)
                self.left(first)
            elif not self._short(first, self._inside):
                moves.load.append(first)
                self._queue.popleft()
                first.stage = Stage.LOADING
                self._inside[first] = None
            else:
                moves.unload.extend(self._make_room(first, now))
                return moves
        moves.unload.extend(self._make_room(None, now))
        return moves

    def idle(self, now: float) -> tuple[Sequence[AnyTenant], float]:
        """Those that go because they were not used for long, and when to check again."""
        going, again = [], math.inf
        for tenant in self._inside:
            at = max(tenant.used_at + tenant.idle_seconds, tenant.held_until)
            if tenant.may_go(now) and at <= now:
                tenant.stage = Stage.LEAVING
                going.append(tenant)
            elif not tenant.is_pinned:
                again = min(again, max(at, now + tenant.idle_seconds / 10))
        return going, again

    def _make_room(self, wanted: AnyTenant | None, now: float) -> Sequence[AnyTenant]:
        """Those that have to go besides those that leave already; none where that would not be enough."""
        staying = [tenant for tenant in self._inside if tenant.stage is not Stage.LEAVING]
        going: list[AnyTenant] = []
        candidates = sorted((one for one in staying if one.may_go(now)), key=lambda one: one.popularity)
        for tenant in candidates:
            short = self._short(wanted, staying)
            # One on another GPU takes nothing of what is short.
            if MODELS in short or any(tenant.needs.get(place) for place in short):
                going.append(tenant)
                staying.remove(tenant)
        if self._short(wanted, staying):
            return ()
        for tenant in going:
            tenant.stage = Stage.LEAVING
        return going

    def _short(self, wanted: AnyTenant | None, others: Iterable[AnyTenant]) -> set[str]:
        """The places of which more is taken than there is."""
        tenants = (*others, *(() if wanted is None else (wanted,)))
        short = set()
        for place, most in self._limits.items():
            if place == MODELS:
                # What leaves has no requests any more. Its memory has still to come back.
                taken = sum(tenant.stage is not Stage.LEAVING for tenant in tenants)
            else:
                taken = sum(tenant.needs.get(place, 0) for tenant in tenants)
            if taken > most:
                short.add(place)
        return short
