"""Sends responses in the order of their requests, for models with preserve_ordering and for streams."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from rocserve.core.requests import Answer, InferResponse
from rocserve.core.serving import ForwardingResponder, Responder
from rocserve.scheduling.batch import send_copied


class ResponseSequencer:
    """Holds back a ticket's responses until all earlier tickets have ended, and sends one response at a time."""

    def __init__(self) -> None:
        self._tickets: deque[Ticket] = deque()
        self._is_sending = False

    def ticket(self) -> Ticket:
        ticket = Ticket(self)
        self._tickets.append(ticket)
        return ticket

    def is_next(self, ticket: Ticket) -> bool:
        """Return whether a response of the ticket would be sent immediately."""
        return not self._is_sending and self._tickets[0] is ticket

    def send_due(self) -> None:
        """Send the responses that need not wait any more."""
        if self._is_sending:
            return
        self._is_sending = True
        tickets = self._tickets
        try:
            while tickets:
                ticket = tickets[0]
                if ticket.waiting:
                    ticket.waiting.popleft()()
                elif ticket.has_ended:
                    tickets.popleft()
                else:
                    break
        finally:
            self._is_sending = False


class Ticket:
    __slots__ = ("has_ended", "sequencer", "waiting")

    def __init__(self, sequencer: ResponseSequencer) -> None:
        self.sequencer = sequencer
        self.waiting: deque[Callable[[], None]] = deque()
        self.has_ended = False

    def send(self, send: Callable[[], None], final: bool = True) -> None:
        """Call `send` now, or when all earlier tickets have ended. `final`: the ticket ends with this response."""
        self.waiting.append(send)
        self.has_ended = final
        self.sequencer.send_due()

    def end(self) -> None:
        self.has_ended = True
        self.sequencer.send_due()


class OrderedResponder(ForwardingResponder):
    """Sends the responses to one request when its ticket allows."""

    def __init__(self, responder: Responder, ticket: Ticket, work_off: Callable[[Iterator[None]], object]) -> None:
        """`work_off`: runs long work step by step."""
        super().__init__(responder)
        self._ticket = ticket
        self._work_off = work_off

    def send(self, answer: Answer, final: bool = True) -> None:
        ticket = self._ticket
        if isinstance(answer, InferResponse) and answer.slot is not None and not ticket.sequencer.is_next(ticket):
            # The tensors are views of memory that is reused after this call, or that a model waits for.
            if answer.is_large:
                self._work_off(send_copied(answer, final, self))
                return
            answer.data, answer.slot = [bytes(data) for data in answer.data], None
        ticket.send(lambda: self._responder.send(answer, final), final)

    def out_of_order(self) -> Responder:
        """End the ticket, and return the responder that does not wait, for a request that is refused."""
        self._ticket.end()
        return self._responder
