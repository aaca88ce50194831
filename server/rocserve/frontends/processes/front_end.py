"""Serves a front end's end of its link: sends requests to the server, and gives the answers to the clients."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from rocserve.core.errors import ServeError
from rocserve.core.memo import Memo
from rocserve.core.passed_descriptors import receive_with_descriptors, send_with_descriptors
from rocserve.core.plain import from_json
from rocserve.core.printable import encodable
from rocserve.core.private_paths import PrivatePaths
from rocserve.core.requests import InferRequest, RequestHead
from rocserve.core.responses import LARGE_RESPONSE, InferResponse
from rocserve.core.sequences import SequenceOrder
from rocserve.core.steps import Steps
from rocserve.core.tensor_places import PackedTensors, TensorPlaces
from rocserve.core.tensors import Buffer
from rocserve.frontends.processes.forwarding import ForwardedAnswers, FrontExchanges
from rocserve.frontends.processes.heads import AnswerHead, input_places, write_head
from rocserve.frontends.processes.link_end import LARGEST_SHARED, FrontLinkEnd, numbers
from rocserve.links import entries
from rocserve.links.details import write_details
from rocserve.links.entries import ENTRY, read_failure
from rocserve.links.exchanges import Exchanges
from rocserve.links.opening import FRONT_MESSAGE, FRONT_RINGS, MESSAGES, accept
from rocserve.links.texts import REMEMBERED, SentTexts, Text
from rocserve.plane import anonymous_file
from rocserve.plane.heap import COPIED_AT_ONCE, SHARES, Heap, HeapFull, HeapReader, Slot, copy_in_steps, fill
from rocserve.plane.loop import Alarm, PlaneLoop
from rocserve.services.inference import ClientResponder

_WATCH_AFTER_SECONDS = 0.01
"""Between two looks at the requests that wait. Most are answered sooner, and to watch a gRPC call costs an event."""


class _Head(Text):
    """The common part of many requests."""

    __slots__ = ("heap_number", "places")

    def __init__(self, places: TensorPlaces) -> None:
        super().__init__()
        self.places = places
        self.heap_number = 0
        """The heap for their inputs; 0 = the front end's heap."""


@dataclass(eq=False)
class RemoteInference:
    """Takes the inference requests of a front end's handlers, see services.inference.Inference. A source of the front
    end's loop that the caller must add. On the loop's thread."""

    _connection: socket.socket
    plane: PlaneLoop
    paths: PrivatePaths
    """Removes the server's paths from errors."""
    _log: logging.Logger
    _on_message: Callable[[int, int], None]
    """Takes the kind and the number of entries that do not concern exchanges."""
    _on_gone: Callable[[], None]
    """Called when the server has ended."""
    wake_descriptor: int | None = field(default=None, init=False)
    longest_sleep_seconds = math.inf
    idle_polls = 1

    def __post_init__(self) -> None:
        """Wait for the server's descriptors. Raises EOFError if the server has ended."""
        connection, plane = self._connection, self.plane
        accepted = accept(connection, len(FRONT_MESSAGE), FRONT_RINGS, FRONT_RINGS)
        self._answers_heap = HeapReader(accepted.servers_heap)
        self._inbox = accepted.end.readers[MESSAGES]
        self.end = FrontLinkEnd(accepted.end, accepted.heap, plane, accepted.ring)
        sleeps = anonymous_file.open_for_reading(plane.doorbell.sleeps)
        send_with_descriptors(connection, FRONT_MESSAGE, (sleeps,))
        os.close(sleeps)
        self._heads = Memo[RequestHead, _Head]()
        self._sent_heads = SentTexts(REMEMBERED)
        self._received_files: deque[int] = deque()
        """Descriptors of heaps that have arrived through the socket before their entries."""
        self._output_heaps: dict[int, HeapReader] = {}
        """Number -> a worker's heap."""
        self._copies = Counter[int]()
        """Heap number -> requests that are being copied into the heap."""
        self._ending_heaps: set[int] = set()
        """Numbers of these heaps that the server has ended, and that get no further requests."""
        self._order = SequenceOrder()
        """The order of sequences while one of their requests is being copied."""
        self._answer_heads: dict[int, tuple[AnswerHead, TensorPlaces]] = {}
        """Number -> (head, where its outputs lie)."""
        self.exchanges: FrontExchanges = Exchanges()
        self._latest = self._marked = self._watched = 0
        """Numbers of requests: the last one, the last one at the previous look, and the last one that was looked at."""
        self._look = Alarm(plane)
        self._sends_origins = False
        plane.register(connection.fileno(), self._on_readable)

    def infer(self, request: InferRequest, client: ClientResponder) -> None:
        """Send a request to the server, after the earlier requests of its sequence; every error goes to the responder.
        Large inputs are copied step by step, some each turn."""
        if self._order.held and self._order.wait_if_held(request.sequence_key, partial(self.infer, request, client)):
            return
        try:
            head = self._heads.get(request.head) or _Head(input_places(request.head))
            places = head.places
            flags, heap_number, nbytes = 0, head.heap_number, places.end
            packed = places.packed(request.data)
            if packed is None:
                flags, heap_number = entries.SIZED, 0
                packed, nbytes = places.sized(request.data)
            details = write_details(request, self._origin(client) if self._sends_origins else b"")
            if details:
                flags |= entries.DETAILED
                packed, nbytes = (*packed, details), nbytes + len(details)
            place, view = self.end.new_slot(nbytes, heap_number)
            left_out = fill(view, packed, COPIED_AT_ONCE)
        except HeapFull as error:
            client.send(error)
            return
        if left_out:
            self._order.hold(request.sequence_key)
            self.plane.work_off(self._copy(request, client, places, flags, place, view, left_out))
        else:
            self._post(request, client, head, flags, place)

    def _copy(
        self,
        request: InferRequest,
        client: ClientResponder,
        places: TensorPlaces,
        flags: int,
        place: int,
        view: memoryview,
        left_out: Sequence[tuple[int, Buffer]],
    ) -> Steps[None]:
        heap_number = place >> entries.HEAP_SHIFT
        self._copies[heap_number] += 1
        for begin, part in left_out:
            yield from copy_in_steps(view, begin, part)
        # Later requests may have arrived meanwhile, and the server remembers only the last heads.
        self._post(request, client, self._heads.get(request.head) or _Head(places), flags, place)
        self._copies[heap_number] -= 1
        if heap_number in self._ending_heaps and not self._copies[heap_number]:
            self._release_heap(heap_number)
        self._order.release(request.sequence_key)

    def _post(self, request: InferRequest, client: ClientResponder, head: _Head, flags: int, place: int) -> None:
        """Post a request whose slot has been filled, after its head if the server does not know the head."""
        try:
            if not head.number:
                self._send_head(request.head, head)
        except HeapFull as error:
            self.end.take_back(place)
            client.send(error)
            return
        self._latest = number = self.exchanges.open((client, request.id))
        if not self._look.is_set:
            self._look_later()
        if request.in_turn:
            flags |= entries.IN_TURN
        if client.takes_one:
            flags |= entries.SINGLE
        if client.protocol == "HTTP":
            flags |= entries.HTTP
        deadline_ns = 0
        # A deadline after 500 years does not fit into an entry, and is dropped.
        if request.deadline is not None and request.deadline < 1 << 34:
            deadline_ns = max(int(request.deadline * 1e9), 1)
        self.end.post(ENTRY.pack(entries.REQUEST, flags, 0, head.number, number, place, deadline_ns))

    def _look_later(self) -> None:
        self._look.set(time.monotonic() + _WATCH_AFTER_SECONDS, self._watch_waiting)

    def _watch_waiting(self) -> None:
        """Watch the clients that have waited between one and two periods, so that the server hears when they leave.
        Each request is looked at once."""
        numbers = range(self._watched + 1, self._marked + 1)
        self._watched, self._marked = self._marked, self._latest
        if self._watched < self._marked:
            self._look_later()
        for number in numbers:
            waiting = self.exchanges.asked.get(number)
            if waiting is None or isinstance(waiting[0], ForwardedAnswers):
                continue
            try:
                waiting[0].watch_cancellation(partial(self.cancel, number))
            except Exception:
                self._log.exception("cannot watch the client of a request")

    def _origin(self, client: ClientResponder) -> bytes:
        known = client.origin()
        return json.dumps((known.protocol, known.received_ns, dict(known.headers), known.address)).encode()

    def refuse(self, error: ServeError, find_id: Callable[[], str]) -> None:
        if self._sends_origins:
            fields = (int(error.code), error.text, encodable(find_id()))
            self.end.post_text(entries.REFUSED, json.dumps(fields).encode())

    def _send_head(self, head: RequestHead, known: _Head) -> None:
        self.end.send_text(self._sent_heads, known, write_head(head), head.is_small)
        if head.is_small:
            self._heads.keep(head, known)

    # Messages of the server.

    def _on_readable(self) -> None:
        if not self._take_rings():
            self.poll()
            self.plane.unregister(self._connection.fileno())
            self._on_gone()

    def _take_rings(self) -> bool:
        """Read rings and descriptors from the socket. Returns False if the server has gone."""
        while True:
            try:
                # Each ring is a byte.
                data, files = receive_with_descriptors(self._connection, 4096, 1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            self._received_files += files

    def has_mail(self) -> bool:
        return self._inbox.has_mail() or bool(self.end.to_return)

    def poll(self) -> bool:
        mail = self._inbox.take()
        if not mail:
            if self.end.to_return:
                self.end.flush()
            return False
        self.end.take_returns()
        for entry in ENTRY.iter_unpack(mail):
            try:
                self._handle(*entry)
            except Exception:
                self._log.exception("cannot handle an answer of the server")
        return True

    def _handle(self, kind: int, flags: int, count: int, text: int, number: int, place: int, nbytes: int) -> None:
        if kind in entries.ANSWERS:
            self._answer(kind, flags, count, text, number, place, nbytes)
        elif kind == entries.RESPONSES:
            self._answer_together(count, text, place)
        elif kind == entries.RETURN:
            for one in (number, place, nbytes)[:count]:
                self.end.give_back(one)
        elif kind == entries.TEXT:
            known = from_json(AnswerHead, self._text(place, nbytes))
            self._answer_heads[text] = known, TensorPlaces(known.head.outputs)
        elif kind == entries.MANY:
            if (waiting := self.exchanges.asked.get(number)) is not None:
                cast(ClientResponder, waiting[0]).expect_many()
        elif kind == entries.LENT:
            if number not in self.end.heaps:
                self._take_rings()
                heap = Heap.of_file(self._received_files.popleft(), nbytes, SHARES, self.plane.work_off_later)
                self.end.heaps[number] = heap
            head = self._sent_heads.find(text, place)
            if head is not None:
                cast(_Head, head).heap_number = number
        elif kind == entries.OUTPUTS:
            self._take_rings()
            self._output_heaps[number] = HeapReader(self._received_files.popleft(), later=self.plane.work_off_later)
        elif kind == entries.FORGET:
            self._forget(number)
        elif kind == entries.ORIGINS:
            self._sends_origins = bool(flags)
        else:
            self._on_message(kind, number)

    def _text(self, place: int, nbytes: int) -> bytes:
        return bytes(self._answers_heap.view(place, nbytes))

    def _forget(self, number: int) -> None:
        outputs = self._output_heaps.pop(number, None)
        if outputs is not None:
            outputs.close()
            return
        for head in self._heads.values():
            if head.heap_number == number:
                head.heap_number = 0
        if self._copies[number]:
            self._ending_heaps.add(number)
        else:
            self._release_heap(number)

    def _release_heap(self, number: int) -> None:
        self._ending_heaps.discard(number)
        del self._copies[number]
        self.end.end_heap(number)
        self.end.post_entry(entries.FORGET, number)

    def _answer(self, kind: int, flags: int, code: int, text: int, number: int, place: int, nbytes: int) -> None:
        last = bool(flags & entries.LAST)
        asked = self.exchanges.asked
        waiting = asked.pop(number, None) if last else asked.get(number)
        if waiting is None:
            return  # A call whose client has left.
        client, request_id = waiting
        if kind == entries.END:
            client.send(None)
            return
        if kind == entries.FAILURE:
            client.send(read_failure(flags, code, text, self._text(place, nbytes)), last)
            return
        if not text and isinstance(client, ForwardedAnswers):
            client.take(self._text(place, nbytes))
            return
        known, places = self._answer_heads[text] if text else self._answer_heads.pop(text)
        data: Sequence[Buffer]
        heap, outputs = self._answers_heap, len(known.head.outputs)
        slot: object = heap
        if flags & entries.PLACED:
            heap_number, held, *table = numbers(2 + 2 * outputs).unpack(heap.view(place, 16 + 16 * outputs))
            heap = self._output_heaps[heap_number]
            slot, nbytes = Slot(self.end.give_back, held, heap), sum(table[1::2])
            data = [heap.view(offset, size) for offset, size in zip(table[::2], table[1::2], strict=True)]
        else:
            view = heap.view(place, nbytes)
            data = places.views(view) if flags & entries.SIZED else PackedTensors(view, places)
            if nbytes > LARGEST_SHARED:
                slot = Slot(self.end.give_back, place, heap)
        parameters, shared, is_large = known.parameters, known.in_shared_memory, nbytes > LARGE_RESPONSE
        client.send(
            InferResponse(known.head, request_id, data, parameters, is_large, slot, shared, known.is_typed), last
        )

    def _answer_together(self, count: int, text: int, table_place: int) -> None:
        known, places = self._answer_heads[text]
        sizes = places.sizes
        assert sizes is not None, "the answer's head has no sizes"
        width = 1 + len(sizes)
        length = 4 + count * width
        table = numbers(length).unpack(self._answers_heap.view(table_place, 8 * length))
        heap = self._output_heaps[table[0]]
        view = heap.view(table[2], table[3])
        slot = Slot(self.end.give_back, table[1], heap)
        asked = self.exchanges.asked
        for at in range(4, length, width):
            client, request_id = asked.pop(table[at])
            begins = table[at + 1 : at + width]
            data = [view[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]
            try:
                client.send(InferResponse(known.head, request_id, data, slot=slot))
            except Exception:
                self._log.exception("cannot pass an answer of the server on")

    def cancel(self, number: int) -> None:
        """Tell the server that the client of an open exchange has gone."""
        if number in self.exchanges.asked:
            self.end.post_entry(entries.CANCEL, number)
