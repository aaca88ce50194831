"""Between a sequence's request and whoever waits for its answer: keeps the states, and says when the next may run."""

from __future__ import annotations

from collections.abc import Callable

from rocserve.core.errors import ServeError
from rocserve.core.forwarding import ForwardingResponder
from rocserve.core.requests import InferResponse
from rocserve.core.serving import Responder
from rocserve.scheduling.sequence.slots import SequenceRequest
from rocserve.scheduling.sequence.states import StateKeeper


class SequenceResponder(ForwardingResponder):
    """For models with states, and for those that may ask for the same request again."""

    __slots__ = ("_keeper", "_on_ended", "request")

    def __init__(
        self,
        responder: Responder,
        request: SequenceRequest,
        keeper: StateKeeper,
        on_ended: Callable[[SequenceRequest], None],
    ) -> None:
        """`on_ended`: called when the request has its last answer, before that is sent."""
        super().__init__(responder)
        self.request: SequenceRequest | None = request
        """None once it has its last answer."""
        self._keeper = keeper
        self._on_ended = on_ended

    def send(self, response: InferResponse, final: bool = True) -> None:
        """See core.serving.Responder."""
        request = self.request
        if self._keeper.states and request is not None and request.states is not None and request.bare is not None:
            try:
                self._keeper.take(response.outputs, request.states)
            except ServeError as error:
                self.fail(error, final)
                return
            wanted = request.bare[1].outputs
            outputs = [tensor for tensor in response.outputs if tensor.name in wanted]
            head = response.head
            response = InferResponse.of(head.model_name, head.model_version, response.id, outputs, response.parameters)
        if final:
            self._note_end()
        self._responder.send(response, final)

    def end(self) -> None:
        """See core.serving.Responder."""
        self._note_end()
        self._responder.end()

    def fail(self, error: ServeError, final: bool = True) -> None:
        """See core.serving.Responder."""
        if final:
            self._note_end()
        self._responder.fail(error, final)

    def _note_end(self) -> None:
        # It knows this: such a ring would keep the client's data until the next collection.
        request, self.request = self.request, None
        if request is not None:
            self._on_ended(request)
