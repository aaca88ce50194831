"""What the repository needs of whatever loads one version of a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from rocserve.config.definition import ModelDefinition
from rocserve.core.serving import ServedVersion


class LoadedVersion(ServedVersion, Protocol):
    """A version that is loaded, warmed and answers requests until `unload`."""

    @property
    def available(self) -> bool:
        """Whether it can answer now; False while all its workers are being restarted."""

    @property
    def status_reason(self) -> str:
        """What is wrong with it, or goes on beside it, for the repository index ("restarting: worker killed by signal
        9"); "" = nothing."""

    def follow_members(self, is_decoupled: bool) -> None:
        """Of an ensemble: whether a member makes it decoupled. Called on the loop, before it is published."""

    async def unload(self) -> None:
        """Take no more requests, finish those that are queued or running, then end the workers."""


class VersionLoader(Protocol):
    async def load(
        self,
        definition: ModelDefinition,
        version: int,
        version_folder: Path,
        content: str,
        on_change: Callable[[], None],
        on_progress: Callable[[str], None],
    ) -> LoadedVersion:
        """Load one version and warm it up. Cancelling the call ends the load and frees all that it took. `content`: two
        loads with the same one load the same.

        `on_change` is to be called, from any thread, whenever `available` changes, or `status_reason` because something
        is wrong or no longer is. `on_progress` is called on the loop while the load lasts, with what it is at in one
        line ("" = nothing that is worth telling); later `status_reason` says what still goes on beside the version.

        Raises:
            ServeError: the version cannot be served; its text is the reason in the repository index.
        """
