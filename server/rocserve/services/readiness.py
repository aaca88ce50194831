"""Whether the server and its models are ready for requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from rocserve.core.errors import ServeError
from rocserve.core.serving import ReadinessCheck, ServedVersion, ServingTableHolder

Ready = bool | Coroutine[Any, Any, bool]
"""Known now, or, if models must be asked, from a coroutine for a task of the event loop."""


@dataclass(eq=False)
class Readiness:
    """Answers on any thread."""

    _tables: ServingTableHolder
    _is_repository_ready: Callable[[], bool]
    _asks_models: bool
    """A model whose own check fails makes the server unready: Triton's strict readiness."""
    is_exiting: bool = False
    """The server and its models are no longer ready."""

    def is_ready(self) -> bool:
        """Whether the server is ready, without asking models."""
        return not self.is_exiting and self._is_repository_ready()

    def of_server(self) -> Ready:
        if not self.is_ready():
            return False
        if not self._asks_models:
            return True
        versions = [version for model in self._tables.table.all_models for version in model.versions.values()]
        return _all_ready([check for version in versions if (check := version.own_check) is not None])

    def of_model(self, name: str, version: str = "") -> Ready:
        """`version`: "" = the highest."""
        try:
            found: ServedVersion = self._tables.table.find(name, version)
        except ServeError:
            return False
        if self.is_exiting:
            return False
        return _all_ready([found.own_check] if found.own_check is not None else [])


def _all_ready(checks: Sequence[ReadinessCheck]) -> Ready:
    if not checks:
        return True

    async def ask() -> bool:
        return all(await asyncio.gather(*(check() for check in checks)))

    return ask()
