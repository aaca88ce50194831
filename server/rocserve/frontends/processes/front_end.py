"""Serves a front end's end of its link: sends requests to the server, and gives the answers to the clients."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from rocserve.core.errors import ServeError
from rocserve.core.memo import Memo
from rocserve.core.passed_descriptors import receive_with_descriptors, send_with_descriptors
from rocserve.core.plain import from_json
from rocserve.core.printable import encodable
from rocserve.core.private_paths import PrivatePaths
from rocserve.core.requests import LARGE_RESPONSE, InferRequest, InferResponse, RequestHead
from rocserve.core.sequences import SequenceOrder
from rocserve.core.steps import Steps
from rocserve.core.tensor_places import PackedTensors, TensorPlaces
from rocserve.core.tensors import Buffer
from rocserve.frontends.processes import entries
from rocserve.frontends.processes.entries import (
    LARGEST_SHARED,
    REQUEST_ENTRY,
    AnswerHead,
    FrontLinkEnd,
    input_places,
    numbers,
    read_failure,
    read_sized,
    sized,
    write_head,
)
from rocserve.plane import anonymous_file
from rocserve.plane.doorbell import SocketRinger, sleep_word
from rocserve.plane.heap import COPIED_AT_ONCE, SHARES, Heap, HeapFull, HeapReader, Slot, copy_in_steps, fill
from rocserve.plane.link import LinkEnd
from rocserve.plane.loop import PlaneLoop
from rocserve.services.inference import ClientResponder
from rocserve.workers.entries import ENTRY, RETURN, write_details

_RINGS_PER_READ = 4096
"""The most rings that one read of the socket takes; each ring is a byte."""
_LATEST_SECONDS = 1 << 34
"""500 years. A later deadline becomes none, because an entry could not hold it."""


@dataclass(slots=True, eq=False)
class _Head:
    """The common part of many requests."""

    places: TensorPlaces | None
    number: int = 0
    """0 = the server does not know the head yet."""
    heap_number: int = 0
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
    _on_message: Callable[[int, int, int, bytes], None]
    """Takes the kind, the number, the count and the content of entries that do not concern inference."""
    _on_gone: Callable[[], None]
    """Called when the server has ended."""
    wake_descriptor: int | None = field(default=None, init=False)
    longest_sleep_seconds = math.inf
    idle_polls = 1

    def __post_init__(self) -> None:
        """Wait for the server's descriptors. Raises EOFError if the server has ended."""
        connection, plane = self._connection, self.plane
        data, descriptors = receive_with_descriptors(connection, len(entries.ATTACH), entries.DESCRIPTORS)
        if data != entries.ATTACH or len(descriptors) != entries.DESCRIPTORS:
            raise EOFError("the server is gone")
        own, servers, requests, answers, server_sleeps = descriptors
        self._heap = Heap.of_file(requests)
        self._answers_heap = HeapReader(answers)
        ends = LinkEnd(own, entries.RINGS, servers, entries.RINGS)
        os.close(own)
        os.close(servers)
        self._inbox = ends.readers[entries.ANSWERS]
        self.end = FrontLinkEnd(ends, self._heap, plane)
        self.end.ring = SocketRinger(sleep_word(server_sleeps), connection).ring
        os.close(server_sleeps)
        sleeps = anonymous_file.open_for_reading(plane.doorbell.sleeps)
        send_with_descriptors(connection, entries.ATTACH, (sleeps,))
        os.close(sleeps)
        self._heads = Memo[RequestHead, _Head](entries.REMEMBERED_HEADS)
        self._heads_by_number = Memo[int, _Head](entries.REMEMBERED_HEADS)
        self._received_files: deque[int] = deque()
        """Descriptors of heaps that have come through the socket, and whose entries have not come yet."""
        self._output_heaps: dict[int, HeapReader] = {}
        """Number -> a worker's heap."""
        self._copies = Counter[int]()
        """Heap number -> requests that are being copied into the heap."""
        self._ending_heaps: set[int] = set()
        """Numbers of these heaps that the server has ended, and that get no further requests."""
        self._order = SequenceOrder()
        """The order of sequences while one of their requests is being copied."""
        self._sent_heads = 0
        self._answer_heads = Memo[int, tuple[AnswerHead, TensorPlaces, bool]](2 * entries.REMEMBERED_HEADS)
        """Number -> (head, where its outputs lie, whether only one answer uses the head)."""
        self._in_flight: dict[int, tuple[ClientResponder, str]] = {}
        """Token -> (the responder that waits for the answer, the request's id)."""
        self._free_tokens: list[int] = []
        self._next_token = 0
        self._sends_origins = False
        plane.register(connection.fileno(), self._on_readable)

    def infer(self, request: InferRequest, client: ClientResponder) -> None:
        """Send a request to the server, after the earlier requests of its sequence; every error goes to the responder.
        Large inputs are copied step by step, some each turn."""
        if self._order.held and self._order.wait_if_held(request, partial(self.infer, request, client)):
            return
        try:
            head = self._heads.get(request.head) or _Head(input_places(request.head))
            places = head.places
            packed = places.packed(request.data) if places is not None else None
            if packed is None or places is None:
                kind, heap_number, (packed, nbytes) = entries.SIZED_REQUEST, 0, sized(request.data)
            else:
                kind, heap_number, nbytes = entries.REQUEST, head.heap_number, places.end
            place, view = self.end.new_slot(nbytes, heap_number)
            left_out = fill(view, packed, COPIED_AT_ONCE)
        except HeapFull as error:
            client.send(error)
            return
        if left_out:
            self._order.hold(request)
            self.plane.work_off(self._copy(request, client, places, (kind, place, nbytes), view, left_out))
        else:
            self._post(request, client, head, kind, place, nbytes)

    def _copy(
        self,
        request: InferRequest,
        client: ClientResponder,
        places: TensorPlaces | None,
        posted: tuple[int, int, int],
        view: memoryview,
        left_out: Sequence[tuple[int, Buffer]],
    ) -> Steps[None]:
        heap_number = posted[1] >> entries.HEAP_SHIFT
        self._copies[heap_number] += 1
        for begin, part in left_out:
            yield from copy_in_steps(view, begin, part)
        # Later requests may have come meanwhile, and the server remembers only the last heads.
        self._post(request, client, self._heads.get(request.head) or _Head(places), *posted)
        self._copies[heap_number] -= 1
        if heap_number in self._ending_heaps and not self._copies[heap_number]:
            self._release_heap(heap_number)
        self._order.release(request)

    def _post(
        self, request: InferRequest, client: ClientResponder, head: _Head, kind: int, place: int, nbytes: int
    ) -> None:
        """Post a request whose slot has been filled, after its head if the server does not know that."""
        details = write_details(request)
        origin = b""
        if self._sends_origins:
            known = client.origin()
            fields = (known.protocol, known.received_ns, dict(known.headers), known.address)
            origin = json.dumps(fields).encode()
        text, text_place = details + origin, 0
        try:
            if text:
                text_place = self.end.place_in_turn((text,), len(text))
            head_number = head.number or self._send_head(request.head, head)
        except HeapFull as error:
            self.end.take_back(place)
            client.send(error)
            return
        if text:
            self.end.post(ENTRY.pack(entries.DETAILS, 0, 0, len(details), 0, text_place, len(text)))
        if self._free_tokens:
            token = self._free_tokens.pop()
        else:
            token = self._next_token = self._next_token + 1
        self._in_flight[token] = (client, request.id)
        flags = (entries.IN_TURN if request.in_turn else 0) | (entries.SINGLE if client.takes_one else 0)
        if client.protocol == "HTTP":
            flags |= entries.HTTP
        deadline_ns = 0
        if request.deadline is not None and request.deadline < _LATEST_SECONDS:
            deadline_ns = max(int(request.deadline * 1e9), 1)
        self.end.post(REQUEST_ENTRY.pack(kind, flags, head_number, token, nbytes, place, deadline_ns))

    def refuse(self, error: ServeError, find_id: Callable[[], str]) -> None:
        if self._sends_origins:
            fields = (int(error.code), error.text, encodable(find_id()))
            self.end.post_text(entries.REFUSED, json.dumps(fields).encode())

    def _send_head(self, head: RequestHead, known: _Head) -> int:
        number = self._sent_heads % entries.LARGEST_NUMBER + 1
        self.end.post_text(entries.HEAD, write_head(head), count=not head.is_small, layout=number)
        self._sent_heads = known.number = number
        if head.is_small:
            self._heads.keep(head, known)
            self._heads_by_number.keep(number, known)
        return number

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
                data, files = receive_with_descriptors(self._connection, _RINGS_PER_READ, 1, socket.MSG_DONTWAIT)
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
                self._log.exception("an answer of the server could not be handled")
        return True

    def _handle(self, kind: int, last: int, count: int, layout: int, number: int, place: int, nbytes: int) -> None:
        if kind in entries.ANSWERS_OF_ONE:
            self._answer(kind, bool(last), count, layout, number, place, nbytes)
        elif kind == entries.RESPONSES:
            self._answer_together(count, layout, place, nbytes)
        elif kind == RETURN:
            for each in (number, place, nbytes)[:count]:
                self.end.give_back(each)
        elif kind == entries.HEAD:
            known = from_json(AnswerHead, self._text(place, nbytes))
            self._answer_heads.keep(layout, (known, TensorPlaces(known.head.outputs), bool(count)))
        elif kind == entries.WATCH:
            waiting = self._in_flight.get(number)
            if waiting is not None:
                client = waiting[0]
                client.watch_cancellation(lambda: self._on_client_left(number, client))
        elif kind == entries.MANY:
            waiting = self._in_flight.get(number)
            if waiting is not None:
                waiting[0].expect_many()
        elif kind == entries.LENT:
            if number not in self.end.heaps:
                self._take_rings()
                heap = Heap.of_file(self._received_files.popleft(), nbytes, SHARES, self.plane.work_off_later)
                self.end.heaps[number] = heap
            lent = self._heads_by_number.get(layout)
            if lent is not None:
                lent.heap_number = number
        elif kind == entries.ENDED:
            for head in self._heads.values():
                if head.heap_number == number:
                    head.heap_number = 0
            if self._copies[number]:
                self._ending_heaps.add(number)
            else:
                self._release_heap(number)
        elif kind == entries.OUTPUTS:
            self._take_rings()
            self._output_heaps[number] = HeapReader(self._received_files.popleft(), later=self.plane.work_off_later)
        elif kind == entries.OUTPUTS_ENDED:
            self._output_heaps.pop(number).close()
        elif kind == entries.ORIGINS:
            self._sends_origins = bool(last)
        else:
            self._on_message(kind, number, count, self._text(place, nbytes))

    def _text(self, place: int, nbytes: int) -> bytes:
        return bytes(self._answers_heap.view(place, nbytes))

    def _release_heap(self, number: int) -> None:
        self._ending_heaps.discard(number)
        del self._copies[number]
        self.end.end_heap(number)
        self.end.post(ENTRY.pack(entries.UNUSED, 0, 0, 0, number, 0, 0))

    def _answer(self, kind: int, last: bool, code: int, head_number: int, token: int, place: int, nbytes: int) -> None:
        client, request_id = self._in_flight[token]
        if last:
            del self._in_flight[token]
            self._free_tokens.append(token)
        if kind == entries.END:
            client.send(None)
            return
        if kind == entries.FAILURE:
            client.send(read_failure(code, self._text(place, nbytes)), last)
            return
        known, places, is_single_use = self._answer_heads[head_number]
        if is_single_use:
            del self._answer_heads[head_number]
        data: Sequence[Buffer]
        heap, outputs = self._answers_heap, len(known.head.outputs)
        slot: object = heap
        if kind == entries.PLACED_RESPONSE:
            number, *table = numbers(1 + 2 * outputs).unpack(heap.view(place, 8 + 16 * outputs))
            heap = self._output_heaps[number]
            slot, nbytes = Slot(self.end.give_back, nbytes, heap), sum(table[1::2])
            data = [heap.view(offset, size) for offset, size in zip(table[::2], table[1::2], strict=True)]
        else:
            view = heap.view(place, nbytes)
            data = PackedTensors(view, places) if kind == entries.RESPONSE else read_sized(view, outputs)
            if nbytes > LARGEST_SHARED:
                slot = Slot(self.end.give_back, place, heap)
        parameters, shared, is_large = known.parameters, known.in_shared_memory, nbytes > LARGE_RESPONSE
        client.send(
            InferResponse(known.head, request_id, data, parameters, shared, known.is_typed, is_large, slot), last
        )

    def _answer_together(self, count: int, head_number: int, table_place: int, held: int) -> None:
        known, places, _ = self._answer_heads[head_number]
        sizes = places.sizes
        assert sizes is not None, "of a head that says no sizes"
        width = 1 + len(sizes)
        length = 3 + count * width
        table = numbers(length).unpack(self._answers_heap.view(table_place, 8 * length))
        heap = self._output_heaps[table[0]]
        view = heap.view(table[1], table[2])
        slot = Slot(self.end.give_back, held, heap)
        for at in range(3, length, width):
            token = table[at]
            client, request_id = self._in_flight.pop(token)
            self._free_tokens.append(token)
            begins = table[at + 1 : at + width]
            data = [view[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]
            try:
                client.send(InferResponse(known.head, request_id, data, slot=slot))
            except Exception:
                self._log.exception("an answer of the server could not be handed on")

    def _on_client_left(self, token: int, client: ClientResponder) -> None:
        waiting = self._in_flight.get(token)
        if waiting is not None and waiting[0] is client:
            self.end.post(ENTRY.pack(entries.LEFT, 0, 0, 0, token, 0, 0))
