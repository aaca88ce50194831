"""Keeps replaced members for the ensembles that still use them."""

from __future__ import annotations

import asyncio
from collections.abc import Set

from rocserve.core.serving import ServedVersion, ServingTable
from rocserve.repository.load_order import LoadedVersion


class HeldMembers:
    """Knows which versions that the serving table no longer offers are members of a served ensemble: it goes on with
    them until its own new content is served. All calls are made on the loop's thread."""

    def __init__(self) -> None:
        self._members: dict[LoadedVersion, Set[ServedVersion]] = {}
        """Ensemble -> the members that it goes on with."""
        self._waiting: list[asyncio.Future[None]] = []

    def holds(self, ensemble: LoadedVersion) -> bool:
        return ensemble in self._members

    def hold(self, ensemble: LoadedVersion, members: Set[ServedVersion], table: ServingTable) -> None:
        """Let an ensemble go on with these members, which are those of an earlier table."""
        ensemble.hold_members(table)
        self._members[ensemble] = members

    def release(self, ensemble: LoadedVersion) -> None:
        """Let an ensemble use the current members; or it has ended."""
        if self._members.pop(ensemble, None) is not None:
            ensemble.hold_members(None)
            waiting, self._waiting = self._waiting, []
            for waiter in waiting:
                if not waiter.done():
                    waiter.set_result(None)

    async def wait(self, member: ServedVersion) -> None:
        """Return when no ensemble uses the member."""
        while any(member in members for members in self._members.values()):
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            await waiter
