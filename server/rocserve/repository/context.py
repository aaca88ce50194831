"""What the models of a repository share."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rocserve.repository.background import BackgroundTasks
from rocserve.repository.load_slots import LoadSlots
from rocserve.repository.loader import LoadedVersion, VersionLoader
from rocserve.repository.retry import Retries, RetryPolicy
from rocserve.repository.scan import ModelScan

if TYPE_CHECKING:
    from rocserve.repository.residency.resident_models import ResidentModels


class Publisher(Protocol):
    """Makes known what is served."""

    def publish(self, *changed: str) -> None:
        """Replace the serving table, then unload what was retired. `changed`: the keys of the models that may offer
        something else now."""

    def publish_soon(self, *changed: str) -> None:
        """The same on the loop's thread; called from any thread."""

    def retire(self, version: LoadedVersion, done: Callable[[], None]) -> None:
        """Unload a version after the next `publish`, and call back when that has ended."""


class FilesCheck(Protocol):
    async def is_unchanged(self, scan: ModelScan, version: int) -> bool:
        """Whether all that a load of the version reads is still as it was scanned."""

    def files_changed(self, scan: ModelScan) -> bool:
        """Its files changed during a load, whose result was thrown away: load it when they have settled. Whether that
        will be, as somebody follows them."""


@dataclass(frozen=True, slots=True)
class LifecycleContext:
    loader: VersionLoader
    publisher: Publisher
    files: FilesCheck
    load_slots: LoadSlots
    retry: RetryPolicy
    retries: Retries
    background: BackgroundTasks
    log: logging.Logger
    residents: ResidentModels | None = None
    """None: all versions are loaded, and stay."""
