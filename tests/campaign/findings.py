"""Findings: broken promises; and the tally of requests, with the lost ones and their reasons."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from math import inf

from tritonclient.utils import InferenceServerException

from campaign.models import process_name
from rocserve.core.errors import StatusCode
from rocserve_client import RocserveError

KEPT_EACH = 5
"""Findings of a kind that are kept with their text; further ones are only counted."""

_INSIDE = re.compile(
    r"worker of model '([^']+)' version \d+ ended unexpectedly"
    r" \((?:killed by signal 9|its exit status is not known)\); the request was in it"
)
"""A worker's exit status is known to its parent only; nobody knows it if the zygote has been killed too."""
_NO_WORKER = re.compile(r"model '([^']+)' has no worker: restarting: worker ended unexpectedly")
"""A request waits for the next worker, but not for ever: on a busy machine it may be refused."""
_SEQUENCE = re.compile(r"sequence \S+ of model '([^']+)' has been lost with the worker that ran it")
_UNKNOWN_MODEL = re.compile("Request for unknown model: ")
_REGION = re.compile(r"Unable to find shared memory region")
_NOT_BEGUN = re.compile(r"inference request for sequence \S+ to model \S+ must specify the START flag")
CUT_OFF = (OSError, EOFError, HTTPException)
"""What clients raise when their connection has ended."""

KILL_SECONDS = 60.0
"""From a kill until the last request that it costs begins: a sequence's next request may come late."""
RECONNECT_SECONDS = 10.0
"""After a server is back, its clients have reconnected within this time, on a busy machine."""
INSIDE_EACH_KILL = 12
"""The most requests that the honest clients of one model have under way; a sequence may lose its next one, too."""


@dataclass(frozen=True, slots=True)
class Finding:
    kind: str
    text: str
    moment: float
    """time.monotonic()."""


class Findings:
    """Collects findings from all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[Finding] = []
        self.counts: Counter[str] = Counter()

    def add(self, kind: str, text: str, moment: float | None = None) -> None:
        with self._lock:
            self.counts[kind] += 1
            if self.counts[kind] <= KEPT_EACH:
                self._kept.append(Finding(kind, text, time.monotonic() if moment is None else moment))

    @property
    def kept(self) -> list[Finding]:
        with self._lock:
            return list(self._kept)


class Damage:
    """What actions have done that may cost honest requests, and the requests that this has cost."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kills: defaultdict[str, list[float]] = defaultdict(list)
        self._unregistered: list[float] = []
        self._outages: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        """Server -> the intervals in which connections to this server may end."""
        self.lost: Counter[str] = Counter()
        """Process name of killed workers -> requests and sequences that were lost with them."""

    def killed(self, model: str) -> None:
        with self._lock:
            self._kills[process_name(model)].append(time.monotonic())

    def unregistered(self) -> None:
        """Record that an action may have unregistered the clients' shared memory regions."""
        with self._lock:
            self._unregistered.append(time.monotonic())

    @contextmanager
    def outage(self, server: str) -> Iterator[None]:
        """A context in which a process that clients are connected to is killed and replaced."""
        began = time.monotonic()
        with self._lock:
            self._outages[server].append((began, inf))
        yield
        with self._lock:
            self._outages[server][-1] = (began, time.monotonic() + RECONNECT_SECONDS)

    def was_out(self, server: str, begun: float, ended: float) -> bool:
        with self._lock:
            return any(since <= ended and begun <= until for since, until in self._outages[server])

    def excuse(self, server: str, error: Exception, begun: float, ended: float) -> str | None:
        """Why a request to the server was lost by design; None if no action explains it."""
        text = str(error)
        if _is_cut_off(error) and self.was_out(server, begun, ended):
            return "connection to a killed process"
        if (_NOT_BEGUN.search(text) or _REGION.search(text)) and self.was_out(server, begun - KILL_SECONDS, ended):
            return "gone with a killed server"
        with self._lock:
            for pattern, why in ((_INSIDE, "inside a killed worker"), (_SEQUENCE, "sequence in a killed worker")):
                if (found := pattern.search(text)) and _hit(self._kills[process_name(found[1])], begun, ended):
                    self.lost[process_name(found[1])] += 1
                    return why
            if (found := _NO_WORKER.search(text)) and _hit(self._kills[process_name(found[1])], begun, ended):
                return "next worker was late"
            if _REGION.search(text) and _hit(self._unregistered, begun, ended):
                return "region unregistered by another client"
        return None

    def excess(self) -> list[str]:
        """A text for each process name that lost more requests than its kills explain."""
        with self._lock:
            return [
                f"{count} requests were lost in {len(self._kills[name])} kills of {name}"
                for name, count in self.lost.items()
                if count > len(self._kills[name]) * INSIDE_EACH_KILL
            ]


def _is_cut_off(error: Exception) -> bool:
    """Whether the connection ended or could not be made, or the server has not reloaded all its models yet."""
    if isinstance(error, InferenceServerException | RocserveError):
        status = error.status if isinstance(error, RocserveError) else error.status()
        if status in (None, StatusCode.UNKNOWN):
            # Errors within a stream have no code.
            return _UNKNOWN_MODEL.search(str(error)) is not None
        return status in (StatusCode.UNAVAILABLE, "StatusCode.UNAVAILABLE", "503")
    return isinstance(error, CUT_OFF)


def _hit(moments: list[float], begun: float, ended: float) -> bool:
    return any(begun - KILL_SECONDS <= moment <= ended for moment in moments)


class Tally:
    """Counts the outcomes of requests and actions, by client or kind."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.tries: Counter[str] = Counter()
        self.outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def count(self, who: str, outcome: str, times: int = 1) -> None:
        with self._lock:
            self.tries[who] += times
            self.outcomes[who][outcome] += times

    def rows(self) -> list[tuple[str, int, dict[str, int]]]:
        with self._lock:
            return [(who, tries, dict(self.outcomes[who])) for who, tries in sorted(self.tries.items())]
