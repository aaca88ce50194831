"""A request's exchange: its client, its state, and the hooks that its answers pass on their way to the client."""

from __future__ import annotations

import bisect
import enum
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Final, Protocol

from rocserve.core.errors import ServeError
from rocserve.core.responses import Answer, InferResponse


class State(enum.IntEnum):
    """A request's state. `scheduling/README.md` has the diagram."""

    RECEIVED = 0
    """It is being prepared and validated."""
    QUEUED = 1
    """It waits in a queue, and was not handed to an instance."""
    RUNNING = 2
    """An instance has it, or an ensemble's steps run. A decoupled model may answer any number of times."""
    ANSWERED = 3
    """Its last answer is known, and on its way through the hooks: nothing else may answer it."""
    ENDED = 4
    """Its client has the last answer."""


RECEIVED, QUEUED, RUNNING, ANSWERED, ENDED = State

_FOLLOWING: Final = {
    RECEIVED: {QUEUED, RUNNING, ANSWERED},
    QUEUED: {RECEIVED, RUNNING, ANSWERED},  # RECEIVED: its model has been loaded, and prepares it again.
    RUNNING: {QUEUED, ANSWERED},  # QUEUED: its worker is gone, or its model wants it again.
    ANSWERED: {ENDED},
    ENDED: set[State](),
}
_MAY_FOLLOW: Final = tuple(tuple(new in _FOLLOWING[old] for new in State) for old in State)


class HookOrder(enum.IntEnum):
    """The hooks' order: an answer passes them from the first to the last, and then reaches its client."""

    TURN = 0
    """Waits for earlier requests' answers. First: the other hooks act when the answer really goes."""
    STATES = 1
    """Takes a sequence's states out. Before the hooks that keep or show answers: the client did not ask for states."""
    CACHE = 2
    """Keeps the answer. Before the answer is changed for this client: other clients will get it."""
    CALL = 3
    """Ends a model's call for the rate limiter. Before the answer goes: the caller may call again immediately."""
    ITEM = 4
    """Removes the batch dimension for AMD Inference Server's clients. After the cache, which other clients share."""
    TENSORS = 5
    """Records the tensors in the trace. After the changes of shape, and before a region takes the data away."""
    REGION = 6
    """Writes outputs to the client's shared memory, maybe in several turns, and releases the regions."""
    LIMITS = 7
    """Counts the request as ended for its client. After hooks that take turns: until then the client has no answer."""
    TIMING = 8
    """Sends the client the times. After the cache, which other clients share, and almost last, as TRACE."""
    TRACE = 9
    """Records the end. Almost last: the time of all other hooks belongs to the request."""
    LOG = 10
    """Writes the line about the answer, with the time that it took."""


class Held(enum.Enum):
    """`Hook.on_answer` returns HELD if the hook passes the answer on by itself, now or later."""

    HELD = enum.auto()


HELD: Final = Held.HELD


class Hook:
    """A step that the answers to one request pass."""

    __slots__ = ()

    order: HookOrder

    def on_answer(self, exchange: Exchange, answer: Answer, final: bool) -> Answer | Held:
        """Take an answer. Return it or a replacement, or return HELD and call `exchange.pass_on` when it may go on."""
        return answer

    def give_up(self) -> None:
        """Called before the error of a request that never ran passes the hooks after TURN."""

    def on_sent(self, final: bool) -> None:
        """Called when the client has the answer, or sending it has failed."""


class EndHook(Hook):
    """Calls a function once, before the last answer goes on."""

    __slots__ = ("_on_end", "order")

    def __init__(self, order: HookOrder, on_end: Callable[[], None]) -> None:
        self.order = order
        self._on_end = on_end

    def on_answer(self, exchange: Exchange, answer: Answer, final: bool) -> Answer:
        if final:
            self._on_end()
        return answer


class ResponseHook(Hook):
    """Calls a function with each response, which the function's result replaces."""

    __slots__ = ("_change", "order")

    def __init__(self, order: HookOrder, change: Callable[[InferResponse], InferResponse]) -> None:
        self.order = order
        self._change = change

    def on_answer(self, exchange: Exchange, answer: Answer, final: bool) -> Answer:
        return self._change(answer) if isinstance(answer, InferResponse) else answer


class Responder(Protocol):
    """A client's end of an exchange: receives the answers, on the data plane's thread. One call ends the request."""

    def expect_many(self) -> None:
        """Announce any number of responses, because the model is decoupled. Called first. Raises ServeError
        (UNIMPLEMENTED), with the request untouched, if the client can take only one."""

    def send(self, answer: Answer, final: bool = True) -> None:
        """Send one answer. `final` is False only if a decoupled model may send more. A response's tensors are valid
        until this call returns. A response that the wire format cannot express becomes an error."""

    def watch_cancellation(self, callback: Callable[[], None]) -> None:
        """Call back, at most once and on the data plane's thread, when the client no longer waits."""


class Cancellable:
    """Calls back, at most once, when nobody waits for further answers. The base class of most Responders, and of what
    else the other end of a link may cancel."""

    is_cancelled = False
    """Nobody waits for further answers."""
    on_cancel: Callable[[], None] | None = None
    """Reset at the end: it refers to the request, which refers to this object, and the cycle would keep the client's
    data until the next garbage collection."""

    def watch_cancellation(self, callback: Callable[[], None]) -> None:
        """See Responder. The callback replaces an earlier one."""
        if self.is_cancelled:
            callback()
        else:
            self.on_cancel = callback

    def cancel(self) -> None:
        self.is_cancelled = True
        on_cancel, self.on_cancel = self.on_cancel, None
        if on_cancel is not None:
            on_cancel()


_ORDER: Final = attrgetter("order")


class Exchange:
    """One request from its arrival to its end. Implements Responder for its answerer."""

    __slots__ = ("_is_watched", "client", "has_left", "hooks", "on_left", "state", "stop")

    def __init__(self, client: Responder) -> None:
        self.client = client
        self.state = RECEIVED
        self.hooks: Sequence[Hook] = ()
        """In their order."""
        self.has_left = False
        """The client no longer waits."""
        self.on_left: Callable[[], None] | None = None
        """Called when the client leaves; None = nobody needs to know, or the request has ended."""
        self.stop: Callable[[], None] | None = None
        """Asks the model to stop a request that runs; None = it does not run, or runs to its end."""
        self._is_watched = False

    # State

    def enter(self, state: State) -> None:
        """Change the state. Raises RuntimeError, for a fault of the server, if the request may not go from its
        state to this one."""
        if not _MAY_FOLLOW[self.state][state]:
            raise RuntimeError(f"a request that is {self.state.name} cannot become {state.name}")
        self.state = state

    # Hooks

    def add(self, hook: Hook) -> None:
        """Let the answers pass a hook. A later one of the same kind comes first."""
        hooks = list(self.hooks)
        bisect.insort_left(hooks, hook, key=_ORDER)
        self.hooks = hooks

    def has(self, order: HookOrder) -> bool:
        return any(hook.order is order for hook in self.hooks)

    # Answers

    def expect_many(self) -> None:
        """See Responder."""
        self.client.expect_many()

    def send(self, answer: Answer, final: bool = True) -> None:
        """Answer the request. Raises RuntimeError after the last answer."""
        state = self.state
        if state is ANSWERED or state is ENDED:
            raise RuntimeError(f"a request that is {state.name} takes no more answers")
        if self.hooks:
            if final:
                self.state = ANSWERED
            self._pass_from(0, answer, final)
            return
        if final:
            # As in `_end`; without hooks, ANSWERED and ENDED are one moment.
            self.state = ENDED
            self.on_left = self.stop = None
        if isinstance(answer, ServeError):
            answer.forget_frames()
        self.client.send(answer, final)

    def refuse(self, error: ServeError) -> None:
        """Send the error of a request that never ran; it may be ANSWERED already. It does not wait for its turn."""
        if self.state is not ANSWERED:
            self.enter(ANSWERED)
        for hook in self.hooks:
            hook.give_up()
        self._pass_from(bisect.bisect_right(self.hooks, HookOrder.TURN, key=_ORDER), error, True)

    def pass_on(self, hook: Hook, answer: Answer, final: bool) -> None:
        """Let an answer go on from the hook that has held it."""
        self._pass_from(self.hooks.index(hook) + 1, answer, final)

    @staticmethod
    def note_answered_elsewhere(exchanges: Iterable[Exchange]) -> None:
        """Note that clients have received their only answers in another way. There are no hooks."""
        for exchange in exchanges:
            if exchange.state is not RUNNING:  # the usual way takes no further call
                exchange.enter(ANSWERED)
            # As in `_end`; without hooks, ANSWERED and ENDED are one moment.
            exchange.state = ENDED
            exchange.on_left = exchange.stop = None

    def _pass_from(self, first: int, answer: Answer, final: bool) -> None:
        hooks = self.hooks
        for hook in hooks[first:]:
            passed = hook.on_answer(self, answer, final)
            if passed is HELD:
                return
            answer = passed
        if final:
            self._end()
        if isinstance(answer, ServeError):
            answer.forget_frames()
        try:
            self.client.send(answer, final)
        finally:
            for hook in hooks:
                hook.on_sent(final)

    def _end(self) -> None:
        """The hooks and `on_left` refer to the request, which refers to this exchange: the cycle would keep the
        client's data until the next garbage collection."""
        self.state = ENDED
        self.hooks = ()
        self.on_left = self.stop = None

    # Clients that leave

    def watch_cancellation(self, callback: Callable[[], None]) -> None:
        """See Responder. The callback replaces an earlier one; the client is asked once."""
        if self.state is ENDED:
            return
        self.on_left = callback
        if self.has_left:
            callback()
        elif not self._is_watched:
            self._is_watched = True
            self.client.watch_cancellation(self._left)

    def unwatch(self) -> None:
        """Call nobody back until somebody watches again."""
        self.on_left = None

    def _left(self) -> None:
        self.has_left = True
        if self.on_left is not None:
            self.on_left()
