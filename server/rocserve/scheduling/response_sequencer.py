"""Sends responses in the order of their requests, for models with preserve_ordering and for streams."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from rocserve.core.exchange import HELD, Exchange, Held, Hook, HookOrder
from rocserve.core.responses import Answer, InferResponse
from rocserve.core.steps import Steps
from rocserve.scheduling.batch import copied_answer


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
        """Send the responses whose wait is over."""
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
            if tickets and (tickets[0].waiting or tickets[0].has_ended):
                # A fault of one response holds back no other.
                self.send_due()


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


class OrderHook(Hook):
    """Sends the responses to one request when its ticket allows."""

    __slots__ = ("_ticket", "_work_off")

    order = HookOrder.TURN

    def __init__(self, ticket: Ticket, work_off: Callable[[Steps[None]], object]) -> None:
        """`work_off`: runs long work step by step."""
        self._ticket = ticket
        self._work_off = work_off

    def on_answer(self, exchange: Exchange, answer: Answer, final: bool) -> Held:
        ticket = self._ticket
        if isinstance(answer, InferResponse) and answer.slot is not None and not ticket.sequencer.is_next(ticket):
            # The tensors are views of memory that is reused after this call, or that a model waits for.
            if answer.is_large:
                self._work_off(self._copy(exchange, answer, final))
                return HELD
            answer.data, answer.slot = [bytes(data) for data in answer.data], None
        ticket.send(lambda: exchange.pass_on(self, answer, final), final)
        return HELD

    def give_up(self) -> None:
        """End the ticket of a request that is refused: its answer need not wait."""
        self._ticket.end()

    def _copy(self, exchange: Exchange, response: InferResponse, final: bool) -> Steps[None]:
        copy = yield from copied_answer(response)
        self.on_answer(exchange, copy, final)
