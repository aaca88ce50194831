"""Serves the server's end of a front end's link: receives requests, and sends their answers back."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import math
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.memo import Memo
from rocserve.core.passed_descriptors import receive_with_descriptors, send_with_descriptors
from rocserve.core.plain import to_json
from rocserve.core.requests import InferRequest, InferResponse, RequestHead, ResponseHead, parameters_key
from rocserve.core.sequences import SequenceTag
from rocserve.core.tensor_places import PackedTensors, PlacedTensors, TensorPlaces
from rocserve.core.tensors import Buffer
from rocserve.frontends.grpc.service import ServerRoutes
from rocserve.frontends.grpc.transport import UnaryRoute
from rocserve.frontends.processes import entries
from rocserve.frontends.processes.entries import (
    LARGEST_SHARED,
    AnswerHead,
    FrontLinkEnd,
    input_places,
    numbers,
    read_head,
    read_sized,
    sized,
    write_failure,
)
from rocserve.frontends.processes.remote_requests import ForwardedCall, RemoteResponder
from rocserve.observability.failures import RequestFailures
from rocserve.plane import anonymous_file, heap, link
from rocserve.plane.doorbell import SocketRinger, drain_rings, sleep_word
from rocserve.plane.heap import COPIED_AT_ONCE, Heap, HeapFull, HeapReader, HeapShare, SharedHeap, Slot, fill
from rocserve.plane.link import LinkEnd
from rocserve.plane.loop import PlaneLoop
from rocserve.services.inference import InferenceService
from rocserve.workers.entries import ENTRY, NO_DETAILS, RETURN, read_details

_OFFSET = (1 << entries.HEAP_SHIFT) - 1
_REQUESTS = frozenset({entries.REQUEST, entries.SIZED_REQUEST})


@dataclass(eq=False)
class FrontLink:
    """Links one front end to the server. A source of the plane's loop. On its thread unless a method says otherwise."""

    _connection: socket.socket
    plane: PlaneLoop
    _service: InferenceService
    _routes: ServerRoutes
    _known_heads: Memo[bytes, RequestHead]
    """See FrontEndParts.heads."""
    _on_listening: Callable[[int, str], object]
    """Takes 0 and "" if the front end listens, else the system's error number and the reason why it cannot."""
    _on_work: Callable[[int], object]
    """Takes the microseconds that the front end's data plane has worked since its last report."""
    _on_gone: Callable[[str], object]
    """Called once, with the reason: the front end has closed its end, or has sent an entry that cannot be read."""
    _log: logging.Logger
    wake_descriptor: int | None = field(default=None, init=False)
    longest_sleep_seconds = math.inf
    idle_polls = 1

    def __post_init__(self) -> None:
        """Create what both ends share, and send the front end its part through the socket. From any thread. Raises
        OSError, and leaves nothing open then."""
        reading = anonymous_file.open_for_reading
        with ExitStack() as passed, ExitStack() as kept:

            def closing(descriptor: int) -> int:
                passed.callback(os.close, descriptor)
                return descriptor

            own, fronts = (closing(link.create_file("rocserve:front", entries.RINGS)) for _ in range(2))
            requests = closing(heap.create_file("rocserve:requests", entries.HEAP_BYTES))
            self._heap = Heap("rocserve:answers", entries.HEAP_BYTES, later=self.plane.work_off_later)
            kept.callback(self._heap.close)
            files = [
                fronts,
                closing(reading(own)),
                requests,
                closing(self._heap.open_for_reading()),
                closing(reading(self.plane.doorbell.sleeps)),
            ]
            assert len(files) == entries.DESCRIPTORS
            send_with_descriptors(self._connection, entries.ATTACH, files)
            ends = LinkEnd(own, entries.RINGS, closing(reading(fronts)), entries.RINGS)
            self._requests_heap = HeapReader(reading(requests), later=self.plane.work_off_later)
            kept.pop_all()
        self._inbox = ends.readers[entries.REQUESTS]
        self._end = FrontLinkEnd(ends, self._heap, self.plane)
        self.give_back = self._end.give_back
        """Takes a place in the front end's heap that nobody reads any more. From any thread."""
        self._failures = RequestFailures(self._log)
        self._calls: dict[int, ForwardedCall] = {}
        self._heads = Memo[int, _Head](2 * entries.REMEMBERED_HEADS)
        self._shares: dict[int, HeapShare] = {}
        """The front end's number of a heap -> share of the heap."""
        self._output_heaps: dict[HeapReader, int] = {}
        """Output heap that the front end reads -> number."""
        self._heap_numbers = itertools.count(1)
        self._details = NO_DETAILS
        self._origin = b""
        """The next request's origin."""
        self._answer_heads = Memo[object, tuple[int, TensorPlaces]](entries.REMEMBERED_HEADS)
        self._sent_heads = 0
        self._in_flight: dict[int, RemoteResponder] = {}
        self._is_open = True
        self._is_attached = False

    def open(self) -> None:
        """Begin to read the link. From any thread."""
        self.plane.register(self._connection.fileno(), self._on_readable)
        self.plane.add_source(self)

    def _on_readable(self) -> None:
        if not self._is_attached:
            # The front end's first message brings the descriptor of the page where it says that it sleeps.
            data, descriptors = receive_with_descriptors(self._connection, len(entries.ATTACH), 1, socket.MSG_DONTWAIT)
            if data and descriptors:
                self._end.ring = SocketRinger(sleep_word(descriptors[0]), self._connection).ring
                os.close(descriptors[0])
                self._is_attached = True
                self._end.ring()
                return
            self._end_link("it closed its link")
        elif not drain_rings(self._connection):
            self.poll()
            self._end_link("it closed its link")

    def has_mail(self) -> bool:
        return self._inbox.has_mail() or bool(self._end.to_return) or self._end.returned.has_mail()

    def poll(self) -> bool:
        if not self._is_open:
            return False
        inbox, returned = self._inbox, self._end.returned
        # Compared without a call, because most polls of a front end find nothing.
        has_mail = inbox.other_words[inbox.posted_at] != inbox.taken
        try:
            if returned.other_words[returned.posted_at] != returned.taken:
                self._end.take_returns()
            if not has_mail:
                if self._end.to_return:
                    self._end.flush()
                return False
            for kind, _, count, layout, number, place, nbytes in ENTRY.iter_unpack(inbox.take()):
                if kind in _REQUESTS:
                    # The fields of REQUEST_ENTRY.
                    self._begin(kind, count, layout, number & 0xFFFFFFFF, number >> 32, place, nbytes)
                else:
                    self._handle(kind, count, layout, number, place, nbytes)
        except Exception as error:
            self._log.exception("a front end's message could not be handled")
            self._end_link(f"it sent what cannot be read: {error}")
        return True

    def _handle(self, kind: int, count: int, layout: int, number: int, place: int, nbytes: int) -> None:
        if kind == entries.HEAD:
            text = self._text(place, nbytes)
            head = self._known_heads.get(text)
            if head is None:
                head = read_head(text)
                if head.is_small:
                    self._known_heads.keep(text, head)
            self._heads.keep(layout, _Head(head, input_places(head), bool(count)))
        elif kind == entries.DETAILS:
            text = self._text(place, nbytes)
            self._details, self._origin = read_details(text[:layout]), text[layout:]
        elif kind == RETURN:
            for each in (number, place, nbytes)[:count]:
                self.give_back(each)
        elif kind == entries.UNUSED:
            del self._shares[number]
        elif kind == entries.LEFT:
            responder = self._in_flight.get(number)
            if responder is not None:
                responder.left()
        elif kind == entries.REFUSED:
            code, reason, request_id = json.loads(self._text(place, nbytes))
            self._service.refuse(ServeError(StatusCode(code), reason), lambda: request_id)
        elif kind == entries.CALL:
            self._begin_call(number, place, self._requests_heap.view(place, nbytes), layout, bool(count))
        elif kind == entries.CALL_LEFT:
            call = self._calls.pop(number, None)
            if call is not None:  # Otherwise the call has been answered meanwhile.
                call.cancelled()
        elif kind == entries.WORKED:
            self._on_work(number)
        elif kind == entries.LISTENING:
            self._on_listening(count, self._text(place, nbytes).decode())
        else:
            raise ValueError(f"a message of kind {kind}")

    def _text(self, place: int, nbytes: int) -> bytes:
        return bytes(self._requests_heap.view(place, nbytes))

    def _begin(
        self, kind: int, flags: int, head_number: int, token: int, nbytes: int, place: int, deadline_ns: int
    ) -> None:
        known = self._heads[head_number]
        head, places = known.head, known.places
        if known.is_single_use:
            del self._heads[head_number]
        request_id, sequence = "", None
        details = self._details
        if details is not NO_DETAILS:
            self._details = NO_DETAILS
            request_id = details.request_id
            if details.correlation_id or details.flags:
                sequence = SequenceTag(details.correlation_id, bool(details.flags & 1), bool(details.flags & 2))
        takes_one = bool(flags & entries.SINGLE)
        protocol = "HTTP" if flags & entries.HTTP else "GRPC"
        responder = self._in_flight[token] = RemoteResponder(self, token, takes_one, protocol, place, self._origin)
        self._origin = b""
        data: Sequence[Buffer]
        if kind == entries.SIZED_REQUEST:
            data = read_sized(self._requests_heap.view(place, nbytes), len(head.inputs))
        else:
            assert places is not None, "of a head that says no sizes"
            if place >> entries.HEAP_SHIFT:
                share = self._shares[place >> entries.HEAP_SHIFT]
                heap = share.heap
                data = PlacedTensors(heap.reader.view, nbytes, places, heap, place & _OFFSET, (share, responder))
            else:
                data = PackedTensors(self._requests_heap.view(place, nbytes), places)
                self._lend_heap(head_number, known)
        request = InferRequest(
            head,
            request_id,
            data,
            deadline_ns / 1e9 if deadline_ns else None,
            bool(flags & entries.IN_TURN),
            sequence=sequence,
            data_owner=responder,
        )
        try:
            self._service.infer(request, responder)
        except Exception as error:
            # Only this request fails; the front end continues with all others.
            failure = self._failures.error_of(f"an inference request by {protocol}", error)
            if token in self._in_flight:
                responder.send(failure)
        responder.is_accepted = True

    def _lend_heap(self, head_number: int, known: _Head) -> None:
        """Let the front end put the inputs of this head's requests where the workers of their version can read them."""
        heap = self._service.heap_for(known.head)
        if heap is None or heap is known.lent_heap:
            return
        number = next((number for number, share in self._shares.items() if share.heap is heap), 0)
        if not number:
            share = heap.lend()
            if share is None:
                return
            number = next(self._heap_numbers)
            if number >= entries.MOST_HEAPS or not self._send_file(share.heap.open_for_writing()):
                return
            self._shares[number] = share
            heap.on_closed[self] = functools.partial(self._heap_ended, heap, number)
        known.lent_heap = heap
        share_number = self._shares[number].number
        self._end.post(ENTRY.pack(entries.LENT, 0, 0, head_number, number, 0, share_number))

    def _send_file(self, descriptor: int) -> bool:
        """Send a descriptor and close it here. Returns False if the socket is full or the front end has gone."""
        try:
            send_with_descriptors(self._connection, entries.ATTACH, (descriptor,), socket.MSG_DONTWAIT)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True

    def _heap_ended(self, heap: SharedHeap, number: int) -> None:
        for known in self._heads.values():
            if known.lent_heap is heap:
                known.lent_heap = None
        # Requests with inputs in this heap may still be on their way.
        self.post(entries.ENDED, number)

    # Answers: if the front end has ended, they are dropped.

    def answer(self, token: int, response: InferResponse, final: bool) -> None:
        """Raises HeapFull."""
        if not self._is_open:
            return
        key: object = response.head
        if response.in_shared_memory or response.is_typed or response.parameters:
            parameters = parameters_key(response.parameters)
            key = (response.head, tuple(response.in_shared_memory), response.is_typed, parameters)
        known = self._answer_heads.get(key)
        number, places = known if known is not None else (0, TensorPlaces(response.head.outputs))
        packed = places.packed(response.data)
        if packed is None:
            kind, (packed, nbytes) = entries.SIZED_RESPONSE, sized(response.data)
        else:
            kind, nbytes = entries.RESPONSE, places.end
        if nbytes <= LARGEST_SHARED:
            place = self._end.place_in_turn(packed, nbytes)
            number = number or self._send_head(key, AnswerHead.of(response), places)
            self._end.post(ENTRY.pack(kind, final, 0, number, token, place, nbytes))
        elif (table := self._outputs_in_heap(response)) is not None:
            place = self._end.place_in_turn((table,), len(table))
            number = number or self._send_head(key, AnswerHead.of(response), places)
            held = self._end.hold(response.slot, nbytes)
            self._end.post(ENTRY.pack(entries.PLACED_RESPONSE, final, 0, number, token, place, held))
        else:
            place, view = self._end.new_slot(nbytes)
            left_out = fill(view, packed, COPIED_AT_ONCE if response.is_large else nbytes)

            def post() -> None:
                # Many other answers may have been sent meanwhile, and the front end remembers only the last heads.
                known = self._answer_heads.get(key)
                try:
                    number = known[0] if known is not None else self._send_head(key, AnswerHead.of(response), places)
                except HeapFull as error:
                    self._end.take_back(place)
                    self.fail(token, error, final)
                else:
                    self._end.post(ENTRY.pack(kind, final, 0, number, token, place, nbytes))

            self._end.copy_then(post, view, left_out, response)
        if final:
            self._in_flight.pop(token, None)

    def answer_together(self, head: ResponseHead, slot: Slot, nbytes: int, places: list[int]) -> bool:
        """See scheduling.batch.AnswerLink."""
        if not self._is_open:
            return True
        tokens = places[:: 1 + len(head.outputs)]
        if len(tokens) > entries.MOST_TOGETHER:
            return False
        try:
            known = self._answer_heads.get(head)
            if known is not None:
                number = known[0]
            else:
                number = self._send_head(head, AnswerHead(head), TensorPlaces(head.outputs))
            heap = self._output_heap_number(slot.heap) if slot.heap is not None else None
            if heap is None:
                return False
            table = numbers(3 + len(places)).pack(heap, slot.offset, nbytes, *places)
            place = self._end.place_in_turn((table,), len(table))
        except HeapFull:
            return False
        held = self._end.hold(slot, nbytes)
        self._end.post(ENTRY.pack(entries.RESPONSES, True, len(tokens), number, 0, place, held))
        for token in tokens:
            self._in_flight.pop(token, None)
        return True

    def _outputs_in_heap(self, response: InferResponse) -> bytes | None:
        """Return the number of the heap with the outputs, and their offsets and sizes, as in PLACED_RESPONSE. Returns
        None if they lie elsewhere, or if the front end cannot read the heap."""
        heap = response.slot.heap if isinstance(response.slot, Slot) else None
        if heap is None:
            return None
        found: list[int] = []
        for data in response.data:
            offset = heap.offset_of(data) if len(data) else 0
            if offset is None:
                return None
            found += (offset, len(data))
        number = self._output_heap_number(heap)
        return None if number is None else numbers(1 + len(found)).pack(number, *found)

    def _output_heap_number(self, heap: HeapReader) -> int | None:
        """Return the number by which the front end knows an output heap; None if the front end cannot read it."""
        number = self._output_heaps.get(heap)
        if number is None:
            number = next(self._heap_numbers)
            try:
                descriptor = heap.open_for_reading()
            except OSError:
                return None
            if not self._send_file(descriptor):
                return None
            self._output_heaps[heap] = number
            heap.on_closed[self] = lambda: self.post(entries.OUTPUTS_ENDED, self._output_heaps.pop(heap))
            self.post(entries.OUTPUTS, number)
        return number

    def _send_head(self, key: object, head: AnswerHead, places: TensorPlaces) -> int:
        number = self._sent_heads % entries.LARGEST_NUMBER + 1
        text = to_json(head)
        is_single_use = bool(head.parameters) and len(text) > LARGEST_SHARED
        self._end.post_text(entries.HEAD, text, count=is_single_use, layout=number)
        self._sent_heads = number
        if not is_single_use:
            self._answer_heads.keep(key, (number, places))
        return number

    def fail(self, token: int, error: ServeError, final: bool, refused: bool = False) -> None:
        if not self._is_open:
            return
        text = write_failure(error, refused)
        self._end.post_text(entries.FAILURE, text, token, int(error.code), last=final)
        if final:
            self._in_flight.pop(token, None)

    def end(self, token: int) -> None:
        self.post(entries.END, token, last=True)
        self._in_flight.pop(token, None)

    def post(self, kind: int, number: int = 0, last: bool = False) -> None:
        """Post an entry without a text."""
        if self._is_open:
            self._end.post(ENTRY.pack(kind, last, 0, 0, number, 0, 0))

    # All calls but inference.

    def _begin_call(self, number: int, place: int, content: memoryview, message_at: int, is_checked: bool) -> None:
        """Begin a forwarded call, see entries.CALL."""
        method, texts, peer = json.loads(bytes(content[:message_at]))
        message = content[message_at:]
        metadata = [(key, text.encode("latin-1") if key.endswith("-bin") else text) for key, text in texts]
        call = ForwardedCall(self, number, place, method, peer, metadata, message)
        self._calls[number] = call
        try:
            route = (self._routes.open if is_checked else self._routes.guarded)[call.method]
            if isinstance(route, UnaryRoute):
                route.handler(call)
            else:
                call.receiver = route.handler(call)
                if call.receiver is not None:
                    call.receiver.on_message(bytes(message))
        except Exception as error:
            call.reply_error(self._failures.error_of(call.method, error))

    def answer_call(self, kind: int, number: int, content: bytes, count: int = 0) -> None:
        """Answer an open call. Every kind of answer but a stream's message ends the call."""
        call = self._calls.get(number) if kind == entries.CALL_MESSAGE else self._calls.pop(number, None)
        if call is None or not self._is_open:
            return
        try:
            self._end.post_text(kind, content, number, count)
        except HeapFull as error:
            text = error.text.encode(errors="replace")
            self._end.post_text(entries.CALL_END, text, number, int(error.code))

    # The end of the link.

    def _end_link(self, reason: str) -> None:
        if self._stop_listening():
            self._on_gone(reason)

    def _stop_listening(self) -> bool:
        """Return whether this call stopped the link."""
        was_open, self._is_open = self._is_open, False
        if was_open:
            self.plane.unregister(self._connection.fileno())
            self.plane.remove_source(self)
        return was_open

    def close(self) -> None:
        """Release everything, because the front end has ended and nobody waits for its requests."""
        self._stop_listening()
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.cancelled()
        responders, self._in_flight = self._in_flight, {}
        for responder in responders.values():
            responder.left()
        self._end.drop()
        for share in self._shares.values():
            share.heap.on_closed.pop(self, None)
        self._shares.clear()
        for outputs in self._output_heaps:
            outputs.on_closed.pop(self, None)
        self.discard()

    def discard(self) -> None:
        """Release the memory of both ends. The whole end of a link that was never opened, from any thread then."""
        self._connection.close()
        self._requests_heap.close(is_last=True)
        self._heap.close()


@dataclass(slots=True, eq=False)
class _Head:
    """The common part of many requests of the front end."""

    head: RequestHead
    places: TensorPlaces | None
    is_single_use: bool
    """Only the next request uses the head."""
    lent_heap: SharedHeap | None = None
    """The heap into which the front end must put the inputs; None = its own heap."""
