"""The answers of one model version in the response cache: looked up before a request is scheduled, kept behind it."""

from __future__ import annotations

import hashlib
import logging
import struct
import time

from rocserve.core.forwarding import ForwardingResponder
from rocserve.core.model_config import ModelConfig
from rocserve.core.request_prefix import request_prefix
from rocserve.core.requests import LARGE_RESPONSE, InferRequest, InferResponse
from rocserve.core.serving import Responder
from rocserve.core.statistics import ModelStatistics
from rocserve.core.trace import QUEUE_START
from rocserve.core.validation import RequestPlan
from rocserve.scheduling.response_cache import ResponseCache, copied_response

LARGEST_CACHED = 32 << 20
"""Bytes of the inputs of a request that is looked up, and of an answer that is kept: each takes as long to go through
as others may wait, some 30 ms."""
_DIGEST_BYTES = 32
_LENGTH = struct.Struct("<Q")


class CachedAnswers:
    """Of one version; its answers are not those of its successor, which may have the same number."""

    def __init__(
        self, cache: ResponseCache, config: ModelConfig, version: int, statistics: ModelStatistics, log: logging.Logger
    ) -> None:
        self._cache = cache
        self._name = config.name
        self._version = str(version)
        self._statistics = statistics
        self._log = log
        self._is_ensemble = bool(config.ensemble_steps)
        """It has said itself that the request has come."""
        self._owner = object()
        self._said_too_large = False

    def look_up(
        self, request: InferRequest, plan: RequestPlan, responder: Responder, in_order: Responder | None = None
    ) -> Responder | None:
        """Answer a request that was answered before.

        Args:
            in_order: takes the answer in the responder's place, where it may have to wait for others.

        Returns:
            None when that was done, else the responder that keeps the answer on its way.
        """
        if sum(map(len, request.data)) > LARGEST_CACHED:
            return responder
        started_ns = time.monotonic_ns()
        key = _key(request, plan)
        cached = self._cache.get(self._owner, key)
        now_ns = time.monotonic_ns()
        if cached is None:
            return _Keeper(self, key, responder, now_ns - started_ns)
        self._statistics.record_cache_hit(started_ns, now_ns)
        if request.trace is not None and not self._is_ensemble:
            request.trace.note(QUEUE_START, started_ns)
        answer = InferResponse(cached.head, request.id, list(cached.data), dict(cached.parameters))
        answer.is_large = cached.nbytes > LARGE_RESPONSE
        (in_order or responder).send(answer)
        return None

    def keep(self, key: bytes, response: InferResponse, lookup_ns: int) -> None:
        """Keep the answer to a request that was looked for in vain."""
        started_ns = time.monotonic_ns()
        nbytes = sum(map(len, response.data))
        if nbytes > LARGEST_CACHED or not self._cache.put(self._owner, key, copied_response(response)):
            self._say_too_large(nbytes, response.id)
        self._statistics.record_cache_miss(lookup_ns + time.monotonic_ns() - started_ns)

    def close(self) -> None:
        """The version is gone."""
        self._cache.forget(self._owner)

    def _say_too_large(self, nbytes: int, request_id: str) -> None:
        if not self._said_too_large:
            self._said_too_large = True
            self._log.warning(
                "%smodel '%s': a response of %d bytes does not fit into the response cache; --cache-config=local,size=N"
                " makes it larger, and one response has %d bytes at most",
                request_prefix([request_id]),
                self._name,
                nbytes,
                LARGEST_CACHED,
            )


class _Keeper(ForwardingResponder):
    """Keeps the answer that goes through it."""

    def __init__(self, answers: CachedAnswers, key: bytes, responder: Responder, lookup_ns: int) -> None:
        self._answers = answers
        self._key = key
        super().__init__(responder)
        self._lookup_ns = lookup_ns

    def send(self, response: InferResponse, final: bool = True) -> None:
        # Before it is sent: who has an answer and asks again, or asks for the statistics, finds it there.
        self._answers.keep(self._key, response, self._lookup_ns)
        self._responder.send(response, final)


def _key(request: InferRequest, plan: RequestPlan) -> bytes:
    """Equal for requests with the same inputs, in whatever order, that want the same of the model."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    entries = sorted(zip(plan.inputs, request.data, strict=True), key=lambda entry: entry[0].name)
    for spec, data in entries:
        digest.update(repr((spec.name, spec.datatype.value, spec.shape)).encode())
        digest.update(_LENGTH.pack(len(data)))
        digest.update(data)
    digest.update(repr((plan.outputs, sorted(plan.classifications.items()))).encode())
    return digest.digest()
