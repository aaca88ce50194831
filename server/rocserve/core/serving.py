"""The serving table: what the front ends read on every request, and the two calls that join the layers.

The control plane (repository) builds a new table and publishes it by one assignment; the data plane only reads it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rocserve.core.errors import ServeError, invalid_argument, not_found, unavailable
from rocserve.core.hints import names_hint
from rocserve.core.memo import Memo
from rocserve.core.model_config import ModelConfig
from rocserve.core.requests import Answer, InferRequest, RequestHead
from rocserve.core.statistics import ModelStatistics


class ForwardingResponder:
    """Forwards all to another responder. Implements core.serving.Responder."""

    __slots__ = ("_responder",)

    def __init__(self, responder: Responder) -> None:
        self._responder = responder

    def expect_many(self) -> None:
        self._responder.expect_many()

    def send(self, answer: Answer, final: bool = True) -> None:
        self._responder.send(answer, final)

    def watch_cancellation(self, callback: Callable[[], None]) -> None:
        self._responder.watch_cancellation(callback)


class EndingResponder(ForwardingResponder):
    """Forwards all as well, and calls `on_end` once, before the last answer goes out."""

    __slots__ = ("_on_end",)

    def __init__(self, responder: Responder, on_end: Callable[[], None]) -> None:
        super().__init__(responder)
        self._on_end: Callable[[], None] | None = on_end

    def send(self, answer: Answer, final: bool = True) -> None:
        if final:
            on_end, self._on_end = self._on_end, None
            if on_end is not None:
                on_end()
        self._responder.send(answer, final)


_HIGHEST_VERSION = 2**63 - 1
_MOST_DIGITS = 20
"""Behind zeros: with as many it is higher, and Python makes no number of thousands."""
_MOST_HINTED = 100
"""With more models an unknown one is answered without names: each would be compared, on the data plane's thread."""


class Responder(Protocol):
    """Receives a request's answers. All is called on the data plane's thread, and exactly one call ends the request."""

    def expect_many(self) -> None:
        """Any number of responses will come: the model is decoupled. Called before all others. Raises: ServeError:
        UNIMPLEMENTED, there is room for one only; nothing has been done with the request."""

    def send(self, answer: Answer, final: bool = True) -> None:
        """One answer, the last unless `final` is False, as it may be with decoupled models. A response's tensors are
        valid only until this call returns; what has no form on the wire becomes an error instead."""

    def watch_cancellation(self, callback: Callable[[], None]) -> None:
        """Call back, at most once and on the data plane's thread, when nobody waits for the answer any more."""


class ServedVersion(Protocol):
    """One version of a model that answers requests."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def config(self) -> ModelConfig: ...
    @property
    def config_message(self) -> bytes:
        """The effective configuration as a serialised inference.ModelConfig."""

    @property
    def statistics(self) -> ModelStatistics: ...
    @property
    def properties(self) -> Mapping[str, str]:
        """How it is run, for people and scripts: the engine, why it is that one, and what the engine reports."""

    @property
    def pending_requests(self) -> int:
        """How many wait to be run."""

    @property
    def load_seconds(self) -> float:
        """How long it took from the start of its workers until it was ready; 0 where there was nothing to load."""

    @property
    def worker_pids(self) -> Mapping[int, int]:
        """Of the processes that run it, each with how many models are in it."""

    @property
    def worker_restarts(self) -> int:
        """How often one of them had to be started again."""

    def infer(self, request: InferRequest, responder: Responder) -> None:
        """Validate the request and schedule it; never blocks, on the data plane's thread, errors go to the
        responder."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The versions of a model that the table offers."""

    name: str
    versions: Mapping[int, ServedVersion]
    """Ready versions only."""
    latest: ServedVersion | None
    """The highest ready version."""
    unready: Mapping[int, str] = field(default_factory=dict)
    """Versions that are loading, failed or unloaded, with the reason."""
    namespace: str = ""
    """Its repository, where there may be several of its name."""


@dataclass(frozen=True, slots=True)
class ServingTable:
    models: Mapping[str, ServedModel] = field(default_factory=dict)
    """By what requests and ensembles call them; with namespaces, a model may be there several times."""
    listed: tuple[ServedModel, ...] | None = None
    """Each once; None = as in `models`."""
    ambiguous: Mapping[str, int] = field(default_factory=dict)
    """How many models there are of a name that is in several namespaces."""
    is_returning: bool = False
    """The server has taken another's place, and not yet loaded all that this one had: a client that had answers of a
    model that is not there may ask again."""
    by_head: Memo[RequestHead, ServedVersion] = field(default_factory=Memo, init=False, compare=False, repr=False)
    """What `find` gave for the heads that clients have sent lately."""
    members: Memo[object, tuple[weakref.ref[ServedVersion], ...]] = field(
        default_factory=Memo, init=False, compare=False, repr=False
    )
    """Of ensembles that keep answers, what their steps would run."""

    @property
    def all_models(self) -> Iterable[ServedModel]:
        """Each once."""
        return self.models.values() if self.listed is None else self.listed

    def named_by(self, head: RequestHead) -> ServedVersion:
        """As `find`, and remembers it."""
        found = self.find(head.model_name, head.model_version)
        return self.by_head.keep(head, found) if head.is_small else found

    def find(self, name: str, version: str) -> ServedVersion:
        """The version that a request names; texts and codes are Triton's. Raises: ServeError: NOT_FOUND or UNAVAILABLE
        when there is none ready, INVALID_ARGUMENT for a bad version text."""
        number = parse_version(version) if version else None
        model = self.models.get(name)
        if model is None:
            if name in self.ambiguous:
                raise invalid_argument(
                    f"There are {self.ambiguous[name]} identifiers of model '{name}' in global map, model namespace"
                    " must be provided to resolve ambiguity."
                )
            models = self.models.items() if len(self.models) <= _MOST_HINTED else ()
            served = [known for known, each in models if each.latest is not None]
            hint = names_hint("served are", name, served)
            raise self._missing(f"Request for unknown model: '{name}' is not found{hint}")
        if number is None:
            if model.latest is None:
                raise self._missing(f"Request for unknown model: '{name}' has no available versions")
            return model.latest
        version_there = model.versions.get(number)
        if version_there is not None:
            return version_there
        if number in model.unready:
            raise unavailable(f"Request for unknown model: '{name}' version {number} is not at ready state")
        raise self._missing(f"Request for unknown model: '{name}' version {number} is not found")

    def _missing(self, text: str) -> ServeError:
        return unavailable(text) if self.is_returning else not_found(text)


def parse_version(text: str) -> int:
    """A version as clients write it; Triton's wording for other texts."""
    digits = text.removeprefix("-").lstrip("0")[:_MOST_DIGITS]
    if text.isascii() and text.isdigit() and (number := int(digits or 0)) <= _HIGHEST_VERSION:
        return number
    if text.isascii() and text[:1] == "-" and text[1:].isdigit() and digits:
        raise invalid_argument(f"invalid model version specified '{text}' , version should be an integral value > 0")
    raise invalid_argument(
        f"failed to get model version from specified version string '{text}' (details: stol), version should be"
        " an integral value > 0"
    )


class ServingTableHolder:
    """The one place where the current table is; replaced whole, so readers need no lock."""

    def __init__(self) -> None:
        self.table = ServingTable()


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A row of the repository index. Version and state are empty for a model that was never loaded."""

    name: str
    version: str = ""
    state: str = ""
    """UNKNOWN, LOADING, READY, UNLOADING or UNAVAILABLE."""
    reason: str = ""
    served: ServedVersion | None = field(default=None, compare=False, repr=False)
    """The version itself, where it is loaded."""
    namespace: str = ""
    """The model's, where there are some."""
