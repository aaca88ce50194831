"""What answers one request: the rules that Triton has for it, and the object with which a model sends responses."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rocserve.backends.python.pb_utils.errors import TritonModelException
from rocserve.backends.python.pb_utils.response import InferenceResponse
from rocserve.backends.request_model import Answer, RequestResponder
from rocserve.core.errors import ServeError

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1

AbandonedHandler = Callable[[RequestResponder, bool], None]
"""Takes the responder of a request that nobody can answer any more, and whether it had a response."""


class RequestAnswers:
    """The answers to one request: they come from `execute`'s return or from the sender, on any thread."""

    __slots__ = ("_decoupled", "_lock", "_on_abandoned", "_responder", "_sent", "_to_answer", "is_closed")

    def __init__(
        self,
        responder: RequestResponder,
        decoupled: bool,
        to_answer: Callable[[InferenceResponse], Answer],
        on_abandoned: AbandonedHandler,
    ) -> None:
        """`to_answer`: makes of a response what is sent. `on_abandoned` may be called from a garbage collection."""
        self._responder = responder
        self._decoupled = decoupled
        self._to_answer = to_answer
        self._on_abandoned = on_abandoned
        self._lock = threading.Lock()
        self._sent = 0
        self.is_closed = False
        """Whether the final answer has been given."""

    def __del__(self) -> None:
        # A request that the model has dropped would leave its client waiting.
        if not self.is_closed:
            self._on_abandoned(self._responder, self._sent > 0)

    @property
    def is_cancelled(self) -> bool:
        return self._responder.is_cancelled

    def returned(self, response: InferenceResponse) -> Answer:
        """What `execute` has returned for the request, which is its only response."""
        self._account(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return self._to_answer(response)

    def send(self, response: InferenceResponse | None, flags: int) -> None:
        """
        Raises:
            TritonModelException: the flags, or one response too many or too few; nothing was sent.
        """
        if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if flags == 0 and response is None:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        self._account(response, flags)
        answer = None if response is None else self._to_answer(response)
        self._respond(answer, flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def fail(self, error: ServeError) -> None:
        """End the request with an error, unless its final answer has been given."""
        if self.close():
            self._respond(error, True)

    def close(self) -> bool:
        """Let nothing more be sent; whether something might have been."""
        with self._lock:
            was_open, self.is_closed = not self.is_closed, True
        return was_open

    def _account(self, response: InferenceResponse | None, flags: int) -> None:
        with self._lock:
            if not self._decoupled:
                if response is not None and self._sent:
                    raise TritonModelException(
                        "Unable to send response. Non-decoupled model cannot send more than one response."
                    )
                if response is None and not self._sent:
                    raise TritonModelException(
                        "Unable to send response. Non-decoupled model cannot send complete final before sending a"
                        " response."
                    )
            if self.is_closed:
                raise TritonModelException("Unable to send response. Response sender has been closed.")
            self.is_closed = flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL
            self._sent += 1

    def _respond(self, answer: Answer | None, final: bool) -> None:
        try:
            self._responder.send(answer, final)
        except RuntimeError:
            raise TritonModelException("Unable to send response. Response sender has been closed.") from None


class InferenceResponseSender:
    """Sends the responses to one request, from any thread, also after `execute` has returned."""

    def __init__(self, answers: RequestAnswers) -> None:
        self._answers = answers

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response; with TRITONSERVER_RESPONSE_COMPLETE_FINAL, alone or with a response, end the request.

        Raises:
            TritonModelException: the flags, or one response too many or too few.
        """
        if response is not None and not isinstance(response, InferenceResponse):
            raise TypeError(f"response must be a pb_utils.InferenceResponse, got {type(response).__name__}")
        self._answers.send(response, flags)

    def is_cancelled(self) -> bool:
        """Whether nobody waits for the request's answer any more."""
        return self._answers.is_cancelled
