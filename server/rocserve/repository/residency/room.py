"""Room for resident versions: decides which registered versions are loaded, unloaded for others, or unloaded when idle.

Versions wait for room in a queue, first come, first served, so that small models never overtake a large one forever. To
make room, the least popular idle version is unloaded. Popularity counts requests; a request counts half after each
half-life. A version that does not fit next to the pinned ones is refused as soon as it is first in the queue.

Times are seconds of any steady clock.
"""

from __future__ import annotations

import enum
import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

MODELS = "loaded versions"
"""Key of the bound on the number of loaded versions, next to the keys of the host's and the GPUs' memory."""


class Stage(enum.Enum):
    UNLOADED = "unloaded"
    WAITING = "waiting"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"


@dataclass(slots=True, eq=False)
class Tenant:
    """A registered version and its use of room. The data plane's thread counts requests; the loop does the rest."""

    needs: Mapping[str, int]
    """Memory of the host or of a GPU -> bytes; an estimate until the first load."""
    is_pinned: bool = False
    """Never unloaded for room or idleness."""
    is_retired: bool = False
    """Not served any more: it takes memory until it is gone."""
    idle_seconds: float = math.inf
    """Seconds without requests after which the version is unloaded."""
    stage: Stage = Stage.UNLOADED
    used_at: float = 0.0
    held_until: float = 0.0
    """Time until which the version's sequences may continue."""
    popularity: float = -math.inf
    """Base-2 logarithm of the sum of the requests' weights. The weight of a new request doubles with each half-life of
    the clock, so earlier weights never need an update."""

    @property
    def in_flight(self) -> int:
        """Requests that wait, run, or are being answered, as a version knows them."""
        return 0

    def note_use(self, now: float) -> None:
        # Five minutes: a burst on many rare models does not evict models that are used all day.
        added = now / 300.0
        low, high = sorted((added, self.popularity))
        self.used_at, self.popularity = now, high + math.log2(1.0 + 2.0 ** (low - high))

    def is_idle(self, now: float) -> bool:
        return not self.in_flight and self.held_until <= now

    @property
    def stays(self) -> bool:
        return self.stage is not Stage.UNLOADING and not self.is_retired

    def can_unload(self, now: float) -> bool:
        return self.stage is Stage.LOADED and self.stays and not self.is_pinned and self.is_idle(now)


AnyTenant = TypeVar("AnyTenant", bound=Tenant)


class Room(Generic[AnyTenant]):
    """Accounts for all tenants. Its owner loads and unloads them and reports the results."""

    def __init__(self, limits: Mapping[str, int]) -> None:
        """`limits`: memory -> bytes, and MODELS -> versions; a missing key is unlimited."""
        self._limits = limits
        self._queue: deque[AnyTenant] = deque()
        self._tenants: dict[AnyTenant, None] = {}
        """Tenants that occupy room."""

    def want(self, tenant: AnyTenant) -> None:
        """Load the tenant as soon as there is room."""
        if tenant.stage is Stage.UNLOADED:
            tenant.stage = Stage.WAITING
            self._queue.append(tenant)

    def loaded(self, tenant: AnyTenant, needs: Mapping[str, int]) -> None:
        """Note that the tenant is loaded, or stays loaded because it got a request, with its needs."""
        tenant.stage, tenant.needs = Stage.LOADED, needs

    def remove(self, tenant: AnyTenant) -> None:
        """Note that the tenant was unloaded, failed to load, or waits for room no longer."""
        if tenant.stage is Stage.WAITING:
            self._queue.remove(tenant)
        self._tenants.pop(tenant, None)
        tenant.stage = Stage.UNLOADED

    def moves(self, now: float) -> tuple[Sequence[AnyTenant], Sequence[AnyTenant], Sequence[AnyTenant]]:
        """Return the tenants to load, to unload, and to refuse because they can never fit."""
        load: list[AnyTenant] = []
        refuse: list[AnyTenant] = []
        while self._queue:
            first = self._queue[0]
            pinned = (tenant for tenant in self._tenants if tenant.is_pinned and tenant.stays)
            if self._exceeded_places([first, *pinned]):
                refuse.append(first)
                self.remove(first)
            elif not self._exceeded_places([first, *self._tenants]):
                load.append(first)
                self._queue.popleft()
                first.stage = Stage.LOADING
                self._tenants[first] = None
            else:
                return load, self._choose_unloads([first], now), refuse
        return load, self._choose_unloads([], now), refuse

    def idle(self, now: float) -> tuple[Sequence[AnyTenant], float]:
        """Return the tenants to unload for idleness, and when to check again."""
        going, again = [], math.inf
        for tenant in self._tenants:
            at = max(tenant.used_at + tenant.idle_seconds, tenant.held_until)
            if tenant.can_unload(now) and at <= now:
                tenant.stage = Stage.UNLOADING
                going.append(tenant)
            elif not tenant.is_pinned:
                again = min(again, max(at, now + tenant.idle_seconds / 10))
        return going, again

    def _choose_unloads(self, wanted: Sequence[AnyTenant], now: float) -> Sequence[AnyTenant]:
        """Choose tenants to unload in addition to the leaving ones; none if that would not suffice."""
        staying = [tenant for tenant in self._tenants if tenant.stays]
        going: list[AnyTenant] = []
        candidates = sorted((one for one in staying if one.can_unload(now)), key=lambda one: one.popularity)
        for tenant in candidates:
            short = self._exceeded_places([*wanted, *staying])
            # A tenant of another GPU does not free the memory that is short.
            if MODELS in short or any(tenant.needs.get(place) for place in short):
                going.append(tenant)
                staying.remove(tenant)
        if self._exceeded_places([*wanted, *staying]):
            return ()
        for tenant in going:
            tenant.stage = Stage.UNLOADING
        return going

    def _exceeded_places(self, tenants: Sequence[AnyTenant]) -> set[str]:
        # A version that is being unloaded serves no requests, so only its memory is counted.
        taken = Counter({MODELS: sum(tenant.stays for tenant in tenants)})
        for tenant in tenants:
            taken.update(tenant.needs)
        return {place for place, most in self._limits.items() if taken[place] > most}
