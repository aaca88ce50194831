"""The interface of a version's load: its order, its result and its errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rocserve.config.definition import ModelDefinition
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.printable import printable_name
from rocserve.core.serving import ServedVersion, ServingTable


class LoadedVersion(ServedVersion, Protocol):
    """A version that is loaded, warmed up and answers requests until `unload`."""

    @property
    def is_cold(self) -> bool:
        """Whether the version is registered but not in memory; a request loads it."""

    @property
    def in_flight(self) -> int:
        """How many requests wait, or batches run; 0 for an ensemble. From any thread."""

    @property
    def available(self) -> bool:
        """Whether the version can answer now; False while all its workers are restarting."""

    @property
    def status_reason(self) -> str:
        """The version's problem or background work, for the repository index ("restarting: worker killed by signal 9");
        "" = none."""

    def watch_use(self, on_request: Callable[[], None]) -> None:
        """Call back with each request of a model that may be unloaded, on the data plane's thread."""

    def follow_members(self, is_decoupled: bool) -> None:
        """Note whether a member makes this ensemble decoupled. Called on the loop, before the publication."""

    def hold_members(self, table: ServingTable | None) -> None:
        """Let this ensemble find its members in an earlier table; None = in the current one. Called on the loop."""

    async def answered(self) -> None:
        """Return when this ensemble, which the serving table no longer offers, has answered its requests."""

    async def unload(self) -> None:
        """Refuse new requests, finish queued and running ones, then end the workers."""


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """The version to load, and whom to tell about the load."""

    definition: ModelDefinition
    version: int
    folder: Path
    on_change: Callable[[], None] = lambda: None
    """Called from any thread when `available` changes, and when a problem of `status_reason` appears or ends."""
    on_progress: Callable[[str, bool], None] = lambda text, is_check: None
    """Called on the loop during the load with its current work in one line, "" = nothing to report, and whether the
    version is tried before it is served (core/load_check.py)."""
    reported_warnings: set[str] = field(default_factory=set)
    """Warnings, and places of tracebacks, that loads of the same content have logged."""

    @property
    def name(self) -> str:
        return f"model '{self.definition.name}' version {self.version}"


LoadVersion = Callable[[LoadOrder], Awaitable[LoadedVersion]]
"""Loads one version and warms it up. Cancelling the call ends the load and frees all its resources. Raises ServeError
if the version cannot be served; its text is the reason in the repository index."""


class FilesChanged(ServeError):
    """A version's files changed during its load. `is_followed`: the server loads new files itself. `file`: the file
    that changed last; "" = unknown."""

    def __init__(self, is_followed: bool, file: str = "") -> None:
        which = f" ('{printable_name(file)}' last)" if file else ""
        then = "it is" if is_followed else "it can be"
        text = f"its files changed while it was loading{which}; {then} loaded again when they have settled"
        super().__init__(StatusCode.UNAVAILABLE, text)
        self.is_followed = is_followed
        self.file = printable_name(file)
