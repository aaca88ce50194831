"""The routes of methods that take one message and give one: how they are served, and how errors reach the client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from rocserve.core.errors import ServeError
from rocserve.core.request_memory import Holding, RequestMemory
from rocserve.frontends.grpc.transport import UnaryCall, UnaryRoute
from rocserve.observability.failures import RequestFailures
from rocserve.protocol.faults import parse_message
from rocserve.services.method import Method, QuickMethod, SlowMethod


class MethodRoutes:
    """Makes routes, which anybody may call."""

    def __init__(self, loop: asyncio.AbstractEventLoop, memory: RequestMemory, log: logging.Logger) -> None:
        self._loop = loop
        self._memory = memory
        self._failures = RequestFailures(log)
        self._tasks: set[asyncio.Task[None]] = set()

    def of(self, method: Method) -> UnaryRoute:
        return self._slow(method) if isinstance(method, SlowMethod) else self.quick(_on_bytes(method))

    def quick(self, answer: Callable[[bytes], bytes]) -> UnaryRoute:
        """A handler that answers in place."""

        def handle(call: UnaryCall) -> None:
            try:
                call.reply(answer(call.message))
            except Exception as error:
                self._fail(call, error)

        return UnaryRoute(handle)

    def _slow(self, method: SlowMethod) -> UnaryRoute:
        """A handler that runs as a task of the event loop."""

        async def run(call: UnaryCall, holding: Holding) -> None:
            try:
                answer = await method.answer(parse_message(call.message, method.request))
                call.reply(answer.SerializeToString())
            except Exception as error:
                self._fail(call, error)
            finally:
                self._memory.release(holding)

        def begin(call: UnaryCall, holding: Holding) -> None:
            task = self._loop.create_task(run(call, holding))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        return UnaryRoute(lambda call: self._hand_over(begin, call))

    def _hand_over(self, begin: Callable[[UnaryCall, Holding], None], call: UnaryCall) -> None:
        holding = Holding()
        try:
            self._memory.admit(holding, len(call.message))
        except ServeError as error:
            self._fail(call, error)
            return
        self._loop.call_soon_threadsafe(begin, call, holding)

    def _fail(self, call: UnaryCall, error: Exception) -> None:
        call.reply_error(self._failures.error_of(call.method, error))


def _on_bytes(method: QuickMethod) -> Callable[[bytes], bytes]:
    return lambda message: method.answer(parse_message(message, method.request)).SerializeToString()
