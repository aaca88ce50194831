"""Answers the requests that a Python model has dropped."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from queue import SimpleQueue

from rocserve.backends.python.pb_utils.response import Abandoned
from rocserve.backends.request_model import RESCHEDULED, RequestResponder, Result
from rocserve.core.errors import ServeError, internal


class AbandonedRequests:
    """Takes dropped requests from garbage collections and answers them on a separate thread. A garbage collection may
    run while its thread holds a lock that answering needs; SimpleQueue's `put` is safe even then."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._dropped: SimpleQueue[tuple[RequestResponder, Abandoned] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="abandoned requests", daemon=True)

    def take(self, responder: RequestResponder, state: Abandoned) -> None:
        """Called in a garbage collection."""
        self._dropped.put((responder, state))

    def watch(self) -> None:
        """Start the thread. Called when `execute` has left a request unanswered, which the model may drop later."""
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        self.watch()
        self._dropped.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (dropped := self._dropped.get()) is not None:
            responder, state = dropped
            answer: Result | None = None
            if state is Abandoned.RESCHEDULED:
                answer = RESCHEDULED
            elif state is Abandoned.UNENDED:
                # A client of Triton does not notice a missing final flag. This server's client must not wait for it.
                logging.getLogger(__name__).warning(
                    "model '%s' released a request without TRITONSERVER_RESPONSE_COMPLETE_FINAL; it is ended",
                    self._model_name,
                )
            else:
                answer = internal(f"model '{self._model_name}' released a request without a response")
            # The request may have an answer by now, as when its worker stops, or the server may be gone.
            with suppress(RuntimeError, ServeError, OSError):
                responder.send(answer, True)
