"""Ends the requests that a model has dropped without a final answer, so that no client waits for ever."""

from __future__ import annotations

import logging
import threading
from queue import SimpleQueue

from rocserve.backends.request_model import RequestResponder
from rocserve.core.errors import internal

_LOG = logging.getLogger(__name__)


class AbandonedRequests:
    """Takes dropped requests from garbage collections and answers them on a thread of its own.

    A garbage collection may come while the same thread holds a lock that answering needs; SimpleQueue's `put` is made
    for that, and the thread is there to take from it.
    """

    def __init__(self, model_name: str, decoupled: bool) -> None:
        self._model_name = model_name
        self._decoupled = decoupled
        self._dropped: SimpleQueue[tuple[RequestResponder, bool] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def take(self, responder: RequestResponder, had_response: bool) -> None:
        """From a garbage collection."""
        self._dropped.put((responder, had_response))

    def watch(self) -> None:
        """Start the thread. Called once a request may be dropped: when `execute` has left one unanswered."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="abandoned requests", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Answer what has been dropped, and end the thread."""
        self.watch()
        assert self._thread is not None
        self._dropped.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (dropped := self._dropped.get()) is not None:
            self._end(*dropped)

    def _end(self, responder: RequestResponder, had_response: bool) -> None:
        try:
            if self._decoupled or had_response:
                # A client of Triton does not notice that the final flag never came; here it need not wait either.
                _LOG.warning(
                    "model '%s' let go of a request without TRITONSERVER_RESPONSE_COMPLETE_FINAL; it is ended",
                    self._model_name,
                )
                responder.send(None, True)
            else:
                responder.send(internal(f"model '{self._model_name}' let go of a request without a response"), True)
        except RuntimeError:
            pass  # It was answered meanwhile, as when its worker gives up.
