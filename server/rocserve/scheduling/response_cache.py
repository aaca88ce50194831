"""Caches responses: looks a version's requests up before they are scheduled, and keeps the answers to new ones."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from rocserve.core.exchange import Exchange, Hook, HookOrder
from rocserve.core.model_config import ModelConfig
from rocserve.core.parameters import Parameters
from rocserve.core.request_prefix import request_prefix
from rocserve.core.requests import InferRequest, client_parameters
from rocserve.core.responses import LARGE_RESPONSE, Answer, InferResponse, ResponseHead
from rocserve.core.statistics import ModelStatistics

LARGEST_CACHED = 32 << 20
"""Bytes of inputs up to which a request is looked up, and of outputs up to which an answer is kept. Hashing or copying
so many takes about 30 ms, during which everything else waits."""


@dataclass(frozen=True, slots=True)
class CachedResponse:
    """A response that owns its data."""

    head: ResponseHead
    data: tuple[bytes, ...]
    parameters: Parameters
    nbytes: int


def copied_response(response: InferResponse) -> CachedResponse:
    data = tuple(map(bytes, response.data))
    # An entry and each of its tensors take some 256 bytes in addition to the data.
    nbytes = 256 + sum(256 + len(one) for one in data)
    return CachedResponse(response.head, data, dict(response.parameters), nbytes)


class ResponseCache:
    """Keeps the last used responses of all models. Used on the data plane's thread; any thread may read `nbytes`."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self.nbytes = 0
        self._entries: OrderedDict[tuple[Hashable, bytes], CachedResponse] = OrderedDict()

    def get(self, owner: Hashable, key: bytes) -> CachedResponse | None:
        entry = self._entries.get((owner, key))
        if entry is not None:
            self._entries.move_to_end((owner, key))
        return entry

    def put(self, owner: Hashable, key: bytes, response: CachedResponse) -> bool:
        """Keep a response. Returns False if it is larger than the whole cache."""
        if response.nbytes > self._size_bytes:
            return False
        replaced = self._entries.pop((owner, key), None)
        if replaced is not None:
            self.nbytes -= replaced.nbytes
        self._entries[owner, key] = response
        self.nbytes += response.nbytes
        while self.nbytes > self._size_bytes:
            _, dropped = self._entries.popitem(last=False)
            self.nbytes -= dropped.nbytes
        return True

    def forget(self, owner: Hashable) -> None:
        for key in [key for key in self._entries if key[0] == owner]:
            self.nbytes -= self._entries.pop(key).nbytes


class CachedAnswers:
    """Caches the answers of one version. A reloaded version with the same number has a separate object."""

    def __init__(
        self, cache: ResponseCache, config: ModelConfig, statistics: ModelStatistics, log: logging.Logger
    ) -> None:
        self._cache = cache
        self._name = config.name
        self._statistics = statistics
        self._log = log
        self._is_ensemble = bool(config.ensemble_steps)
        """An ensemble notes QUEUE_START in traces itself."""
        self._owner = object()
        self._members: tuple[object, ...] | None = None
        self._has_warned = False

    def set_members(self, members: tuple[object, ...]) -> None:
        """Set the members on which an ensemble's request runs. Answers of other members are deleted."""
        if members != self._members:
            self.close()
            self._members = members

    def look_up(self, request: InferRequest, exchange: Exchange, sees_requests: bool) -> InferResponse | None:
        """Return the cached answer; without one, return None and let the exchange cache the model's answer.
        `sees_requests`: see ServedVersion."""
        if request.nbytes > LARGEST_CACHED:
            return None
        started_ns = time.monotonic_ns()
        key = _key(request, sees_requests)
        cached = self._cache.get(self._owner, key)
        now_ns = time.monotonic_ns()
        if cached is None:
            exchange.add(_CacheHook(self, self._owner, key, now_ns - started_ns))
            return None
        self._statistics.record_cache_hit(started_ns, now_ns)
        if request.timing is not None:
            request.timing.is_cached = True
        if request.trace is not None and not self._is_ensemble:
            request.trace.note("QUEUE_START", started_ns)
        answer = InferResponse(cached.head, request.id, list(cached.data), dict(cached.parameters))
        answer.is_large = cached.nbytes > LARGE_RESPONSE
        return answer

    def keep(self, owner: object, key: bytes, response: InferResponse, lookup_ns: int) -> None:
        """Keep the answer to a request that was not in the cache, unless the answers of `owner` have been deleted."""
        started_ns = time.monotonic_ns()
        nbytes = sum(map(len, response.data))
        fits = nbytes <= LARGEST_CACHED
        if fits and owner is self._owner:
            fits = self._cache.put(owner, key, copied_response(response))
        if not fits and not self._has_warned:
            self._has_warned = True
            self._log.warning(
                "%smodel '%s': a response of %d bytes does not fit into the response cache; enlarge it with"
                " --cache-config=local,size=N (one response may have at most %d bytes)",
                request_prefix([response.id]),
                self._name,
                nbytes,
                LARGEST_CACHED,
            )
        self._statistics.record_cache_miss(lookup_ns + time.monotonic_ns() - started_ns)

    def close(self) -> None:
        """Delete the answers, including those of requests in flight: the version, or a member of the ensemble, is
        gone."""
        self._cache.forget(self._owner)
        self._owner = object()


class _CacheHook(Hook):
    """Caches the answer that passes through."""

    __slots__ = ("_answers", "_key", "_lookup_ns", "_owner")

    order = HookOrder.CACHE

    def __init__(self, answers: CachedAnswers, owner: object, key: bytes, lookup_ns: int) -> None:
        self._answers = answers
        self._owner = owner
        self._key = key
        self._lookup_ns = lookup_ns

    def on_answer(self, exchange: Exchange, answer: Answer, final: bool) -> Answer:
        # Kept before sending, because a client that has its answer may ask again, or ask for the statistics.
        if isinstance(answer, InferResponse):
            self._answers.keep(self._owner, self._key, answer, self._lookup_ns)
        return answer


def _key(request: InferRequest, sees_requests: bool) -> bytes:
    """Return a key that is equal only for requests that the model cannot distinguish: everything that reaches the model
    is part of it, except the trace's context, which differs each time and is only passed on."""
    digest = hashlib.blake2b(digest_size=32)
    plan = request.plan
    entries = [*zip(plan.inputs, request.data, strict=True)]
    if sees_requests:
        # repr() distinguishes 1, 1.0, True and "1". The order of parameters has no meaning, and gRPC does not keep it.
        parameters = sorted(client_parameters(request.head).items())
        own = (request.id, request.sequence, plan.priority, plan.timeout_microseconds, parameters)
        digest.update(repr(own).encode())
    else:
        # Engines find inputs by their names: the order does not matter.
        entries.sort(key=lambda entry: entry[0].name)
    for spec, data in entries:
        digest.update(repr((spec.name, spec.datatype.value, spec.shape)).encode())
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    digest.update(repr((plan.outputs, sorted(plan.classifications.items()))).encode())
    return digest.digest()
