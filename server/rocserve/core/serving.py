"""The serving table, which requests read, and the protocols of a served version and a responder. The control plane
(repository) builds a new table and publishes it by one assignment. The data plane only reads it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rocserve.core.errors import invalid_argument, not_found, unavailable
from rocserve.core.exchange import Exchange
from rocserve.core.load_check import LoadCheckReport
from rocserve.core.memo import Memo
from rocserve.core.model_config import ModelConfig
from rocserve.core.printable import names_hint
from rocserve.core.requests import InferRequest, RequestHead
from rocserve.core.statistics import ModelStatistics

LARGEST_VERSION = 2**63 - 1


ReadinessCheck = Callable[[], Coroutine[Any, Any, bool]]
"""Asks a model whether it is ready."""


class ServedVersion(Protocol):
    """A ready version of a model."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def config(self) -> ModelConfig: ...
    @property
    def config_message(self) -> bytes:
        """Return the effective configuration, a serialised inference.ModelConfig."""

    @property
    def statistics(self) -> ModelStatistics: ...
    @property
    def is_cold(self) -> bool:
        """Return whether no ensemble may rely on the version: its first request loads it, or it is unloaded."""

    @property
    def properties(self) -> Mapping[str, str]:
        """Return how the version runs, for people and scripts: the engine, the reason for it, the engine's report."""

    @property
    def sees_requests(self) -> bool:
        """Return whether the model, or a member, sees ids and parameters: its answers may depend on them."""

    @property
    def pending_requests(self) -> int: ...
    @property
    def load_seconds(self) -> float:
        """Return the seconds from the start of the workers until ready; 0 if nothing had to be loaded."""

    @property
    def load_check(self) -> LoadCheckReport:
        """Return the load check's findings about the version."""

    @property
    def worker_pids(self) -> Mapping[int, int]:
        """Return the version's worker processes: process id -> number of models in the process."""

    @property
    def worker_restarts(self) -> int: ...
    @property
    def own_check(self) -> ReadinessCheck | None:
        """Return the function that asks the model itself whether it is ready, for a task of the event loop; None = the
        model has no check."""

    @property
    def has_statistics(self) -> bool:
        """Return whether the version was ever loaded, or has refused a request."""

    def want(self) -> None:
        """Load the version if it is not in memory, because a request will reach it. On the data plane's thread."""

    async def ensure_loaded(self) -> None:
        """Load the version, or an ensemble's members, and wait for it. On the loop. Raises ServeError."""

    def infer(self, request: InferRequest, exchange: Exchange) -> None:
        """Validate and schedule a request, without blocking, on the data plane's thread. Errors go to the exchange."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model in the serving table, with its versions."""

    name: str
    versions: Mapping[int, ServedVersion]
    """Ready versions only."""
    latest: ServedVersion | None
    """The highest ready version."""
    unready: Mapping[int, str] = field(default_factory=dict)
    """Versions that are loading, failed or unloaded, with the reason."""
    namespace: str = ""
    """The model's repository, with --model-namespacing; else ""."""


@dataclass(frozen=True, slots=True)
class ServingTable:
    """The models that answer requests at one moment."""

    models: Mapping[str, ServedModel] = field(default_factory=dict)
    """Name -> model, for every name that identifies a model; with namespaces a model may have several names."""
    listed: tuple[ServedModel, ...] | None = None
    """Each model once; None = the values of `models`."""
    ambiguous: Mapping[str, int] = field(default_factory=dict)
    """Name -> number of models, for a name in several namespaces."""
    by_head: Memo[RequestHead, ServedVersion] = field(default_factory=Memo, init=False, compare=False, repr=False)
    """Results of `find` for recent request heads."""

    @property
    def all_models(self) -> Iterable[ServedModel]:
        return self.models.values() if self.listed is None else self.listed

    def find_by_head(self, head: RequestHead) -> ServedVersion:
        """Return `find`'s result for a head, cached."""
        found = self.find(head.model_name, head.model_version)
        return self.by_head.keep(head, found) if head.is_small else found

    def find(self, name: str, version: str) -> ServedVersion:
        """Return the version that a request names, with Triton's texts and codes. Raises ServeError: NOT_FOUND or, if
        it is not ready, UNAVAILABLE; INVALID_ARGUMENT for a malformed version or an ambiguous name."""
        number = parse_version(version) if version else None
        model = self.models.get(name)
        if model is None:
            if name in self.ambiguous:
                raise invalid_argument(
                    f"There are {self.ambiguous[name]} identifiers of model '{name}' in global map, model namespace"
                    " must be provided to resolve ambiguity."
                )
            # With more models the error names none: comparing all would delay the data plane's thread.
            models = self.models.items() if len(self.models) <= 100 else ()
            served = [known for known, one in models if one.latest is not None]
            hint = names_hint("served are", name, served)
            raise not_found(f"Request for unknown model: '{name}' is not found{hint}")
        if number is None:
            if model.latest is None:
                raise not_found(f"Request for unknown model: '{name}' has no available versions")
            return model.latest
        version_there = model.versions.get(number)
        if version_there is not None:
            return version_there
        if number in model.unready:
            raise unavailable(f"Request for unknown model: '{name}' version {number} is not at ready state")
        raise not_found(f"Request for unknown model: '{name}' version {number} is not found")


def parse_version(text: str) -> int:
    """Parse a client's version text. Raises ServeError (INVALID_ARGUMENT) with Triton's text."""
    # Numbers of twenty digits are too high, and Python refuses to parse thousands of digits.
    digits = text.removeprefix("-").lstrip("0")[:20]
    if text.isascii() and text.isdigit() and (number := int(digits or 0)) <= LARGEST_VERSION:
        return number
    if text.isascii() and text[:1] == "-" and text[1:].isdigit() and digits:
        raise invalid_argument(f"invalid model version specified '{text}' , version should be an integral value > 0")
    raise invalid_argument(
        f"failed to get model version from specified version string '{text}' (details: stol), version should be"
        " an integral value > 0"
    )


class ServingTableHolder:
    """Holds the current table. A reader needs no lock, because a new table replaces the old one by one assignment."""

    def __init__(self) -> None:
        self.table = ServingTable()


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A row of the repository index. Version and state are "" for a model that was never loaded."""

    name: str
    version: str = ""
    state: str = ""
    """UNKNOWN, LOADING, CHECKING, READY, UNLOADING or UNAVAILABLE."""
    reason: str = ""
    served: ServedVersion | None = field(default=None, compare=False, repr=False)
    namespace: str = ""
    lacks_files: bool = field(default=False, compare=False)
    """It waits for files that are not in the repository, such as weights. Waiting is not a failure."""
    repository: str = field(default="", compare=False)
    """The repository's label if there are several."""
