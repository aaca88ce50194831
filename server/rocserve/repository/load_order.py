"""The interface of a version's load: its order, its result and its errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rocserve.config.definition import ModelDefinition
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.printable import printable_name
from rocserve.core.serving import ServedModel, ServedVersion


class LoadedVersion(ServedVersion, Protocol):
    """A version that is loaded, warmed up and answers requests until `unload`."""

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

    @property
    def keeps_members(self) -> bool:
        """Whether this ensemble has members that new requests can go on with although others are served."""

    def follow_members(self, served: Mapping[str, ServedModel], is_decoupled: bool) -> None:
        """Let new requests to this ensemble, which fits them, run on the members that are served now. `is_decoupled`:
        whether a member makes the ensemble decoupled. Called on the loop, before the publication."""

    def leave_members(self) -> None:
        """Note that this ensemble gets no new requests. Called on the loop, after the publication."""

    async def unload(self, at_once: bool = False) -> None:
        """Finish queued and running requests, and those of ensembles that began with this version as a member, then end
        the workers. `at_once`: the later steps of those do not wait for; they find the member by name."""


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
