"""A version of an ensemble as the serving table offers it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from rocserve.core.dispatch import Dispatcher
from rocserve.core.errors import ServeError
from rocserve.core.model_config import ModelConfig, OutputConfig
from rocserve.core.request_memory import RequestMemory
from rocserve.core.requests import InferRequest
from rocserve.core.serving import Responder
from rocserve.core.statistics import ModelStatistics
from rocserve.core.trace import QUEUE_START
from rocserve.core.validation import RequestValidator
from rocserve.scheduling.ensemble.graph import EnsembleGraph, labels_of
from rocserve.scheduling.ensemble.run import EnsembleRun
from rocserve.scheduling.response_cache import CachedAnswers
from rocserve.scheduling.scheduler import Drain


class InflightLimit:
    """Each start is matched by one `end`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._running = 0
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_starting = False

    def begin(self, start: Callable[[], None]) -> bool:
        """Call `start` now, or when those before it have ended; False: it has to wait."""
        if self._waiting or self._running >= self._limit:
            self._waiting.append(start)
            return False
        self._running += 1
        start()
        return True

    def end(self) -> None:
        """One that was started has ended."""
        self._running -= 1
        if self._is_starting:
            # It ended as soon as it was started: the loop below goes on, instead of one call within the other.
            return
        self._is_starting = True
        try:
            while self._waiting and self._running < self._limit:
                self._running += 1
                self._waiting.popleft()()
        finally:
            self._is_starting = False


class EnsembleVersion:
    """Implements core.serving.ServedVersion for an ensemble."""

    def __init__(
        self,
        config: ModelConfig,
        config_message: bytes,
        version: int,
        statistics: ModelStatistics,
        dispatcher: Dispatcher,
        memory: RequestMemory,
        answers: CachedAnswers | None = None,
    ) -> None:
        """`memory`: what members answer counts against it, as answers do, until the ensemble has answered.
        `answers`: those that may be given again; None = each request is run."""
        self.name = config.name
        self.version = version
        self.config = config
        self.config_message = config_message
        self.statistics = statistics
        self.dispatcher = dispatcher
        self.memory = memory
        self.answers = answers
        self.graph = EnsembleGraph(config)
        self.outputs = {output.name: output for output in config.outputs}
        limit = config.ensemble_max_inflight_requests
        self.limits = [InflightLimit(limit) for _ in config.ensemble_steps] if limit else []
        """By step; empty: there is no limit."""
        self._validator = RequestValidator(config)
        self.on_request: Callable[[EnsembleVersion], None] | None = None
        """Called for each request before it is run: members may have to be loaded."""
        self._drain = Drain()

    def infer(self, request: InferRequest, responder: Responder) -> None:
        started_ns = time.monotonic_ns()
        try:
            self._validator.validate(request)
            if self.config.decoupled:
                responder.expect_many()
        except ServeError as error:
            self.statistics.note_failure(error.text)
            responder.send(error)
            return
        if self.on_request is not None:
            self.on_request(self)
        self._drain.running += 1
        if request.trace is not None:
            request.trace.note(QUEUE_START, started_ns)
        # What a sequence is answered depends on what came before.
        if self.answers is not None and not self.config.decoupled and request.sequence is None:
            keeper = self.answers.look_up(request, responder)
            if keeper is None:
                self.run_ended()
                return
            responder = keeper
        EnsembleRun(self, request, responder, started_ns).start()

    def close(self, drained: Callable[[], None]) -> None:
        """Take no more requests; call back, once, when all that were taken are answered. Nobody finds the version any
        more when this is called."""
        self._drain.close(drained)
        self._drain.report()

    def run_ended(self) -> None:
        """A request has been answered."""
        self._drain.running -= 1
        self._drain.report()

    def labels_of(self, output: OutputConfig) -> tuple[str, ...]:
        """The labels of an output: the ensemble's own, or those of the member's output that it comes from."""
        return labels_of(self.config, output.name, self.dispatcher.tables.table)
