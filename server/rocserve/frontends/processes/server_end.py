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
from dataclasses import dataclass, field

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.memo import Memo
from rocserve.core.passed_descriptors import receive_with_descriptors, send_with_descriptors
from rocserve.core.requests import InferRequest, RequestHead
from rocserve.core.sequences import SequenceTag
from rocserve.core.tensor_places import PackedTensors, PlacedTensors, TensorPlaces
from rocserve.core.tensors import Buffer
from rocserve.frontends.grpc.service import ServerRoutes
from rocserve.frontends.grpc.transport import UnaryRoute
from rocserve.frontends.processes.answers import FrontAnswers
from rocserve.frontends.processes.forwarding import ABOUT
from rocserve.frontends.processes.heads import input_places, read_head
from rocserve.frontends.processes.link_end import MOST_HEAPS, FrontLinkEnd
from rocserve.frontends.processes.remote_requests import ForwardedCall, RemoteResponder
from rocserve.links import entries
from rocserve.links.details import read_details
from rocserve.links.entries import ENTRY
from rocserve.links.opening import FRONT_MESSAGE, FRONT_RINGS, HEAP_BYTES, MESSAGES, offer
from rocserve.observability.failures import RequestFailures
from rocserve.plane.doorbell import SocketRinger, drain_rings, sleep_word
from rocserve.plane.heap import Heap, HeapShare, SharedHeap
from rocserve.plane.loop import PlaneLoop
from rocserve.services.inference import InferenceService


@dataclass(eq=False)
class FrontLink:
    """Links one front end to the server. A source of the plane's loop; on its thread unless a method says otherwise."""

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
        self._heap = Heap("rocserve:answers", HEAP_BYTES, later=self.plane.work_off_later)
        try:
            name = "rocserve:requests"
            ends, self._requests_heap = offer(
                self._connection, FRONT_MESSAGE, name, self._heap, self.plane, FRONT_RINGS, FRONT_RINGS
            )
        except BaseException:
            self._heap.close()
            raise
        self._inbox = ends.readers[MESSAGES]
        self._end = FrontLinkEnd(ends, self._heap, self.plane)
        self._failures = RequestFailures(self._log)
        self._heads: dict[int, _Head] = {}
        self._shares: dict[int, HeapShare] = {}
        """The front end's number of a heap -> share of the heap."""
        self._heap_numbers = itertools.count(1)
        self.answers = FrontAnswers(self._end, self._heap_numbers, self._send_file)
        self._is_open = True
        self._is_attached = False

    @property
    def in_flight(self) -> int:
        return len(self.answers.exchanges.received)

    def open(self) -> None:
        """Begin to read the link. From any thread."""
        self.plane.register(self._connection.fileno(), self._on_readable)
        self.plane.add_source(self)

    def _on_readable(self) -> None:
        if not self._is_attached:
            # The front end's first message brings the descriptor of the page where it says that it sleeps.
            data, descriptors = receive_with_descriptors(self._connection, len(FRONT_MESSAGE), 1, socket.MSG_DONTWAIT)
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
            for kind, flags, count, text, number, place, nbytes in ENTRY.iter_unpack(inbox.take()):
                if kind == entries.REQUEST:
                    self._begin(flags, text, number, place, nbytes)
                else:
                    self._handle(kind, count, text, number, place, nbytes)
        except Exception as error:
            self._log.exception("cannot handle a front end's message")
            self._end_link(f"it sent what cannot be read: {error}")
        return True

    def _handle(self, kind: int, count: int, text: int, number: int, place: int, nbytes: int) -> None:
        if kind == entries.TEXT:
            content = self._text(place, nbytes)
            head = self._known_heads.get(content)
            if head is None:
                head = read_head(content)
                if head.is_small:
                    self._known_heads.keep(content, head)
            self._heads[text] = _Head(head, input_places(head), number)
        elif kind == entries.RETURN:
            for one in (number, place, nbytes)[:count]:
                self._end.give_back(one)
        elif kind == entries.FORGET:
            del self._shares[number]
        elif kind == entries.CANCEL:
            self.answers.exchanges.cancel(number)
        elif kind == entries.REFUSED:
            code, reason, request_id = json.loads(self._text(place, nbytes))
            self._service.refuse(ServeError(StatusCode(code), reason), lambda: request_id)
        elif kind == entries.CALL:
            self._begin_call(number, place, self._requests_heap.view(place, nbytes), bool(count))
        elif kind == entries.WORKED:
            self._on_work(number)
        elif kind == entries.LISTENING:
            self._on_listening(count, self._text(place, nbytes).decode())
        else:
            raise ValueError(f"a message of kind {kind}")

    def _text(self, place: int, nbytes: int) -> bytes:
        return bytes(self._requests_heap.view(place, nbytes))

    def _begin(self, flags: int, text: int, token: int, place: int, deadline_ns: int) -> None:
        known = self._heads[text] if text else self._heads.pop(text)
        head, places = known.head, known.places
        share = None
        offset, view = place, self._requests_heap.view
        if place >> entries.HEAP_SHIFT:
            share = self._shares[place >> entries.HEAP_SHIFT]
            offset, view = place & entries.OFFSET, share.heap.reader.view
        end = places.end
        if flags & entries.SIZED:
            bounds, end = places.of_sized(view(offset, 8 * len(head.inputs)))
        request_id, sequence, origin = "", None, b""
        if flags & entries.DETAILED:
            # A view of 2 GiB at most, of which nothing is copied.
            request_id, correlation_id, of_sequence, _, origin = read_details(view(offset + end, 1 << 31))
            if correlation_id or of_sequence:
                sequence = SequenceTag(correlation_id, bool(of_sequence & 1), bool(of_sequence & 2))
        protocol = "HTTP" if flags & entries.HTTP else "GRPC"
        responder = RemoteResponder(self.answers, token, bool(flags & entries.SINGLE), protocol, place, origin)
        # Not by `receive`: one ring carries requests and cancellations, so no cancellation can overtake its request.
        self.answers.exchanges.received[token] = responder
        data: Sequence[Buffer]
        if flags & entries.SIZED:
            slot = view(offset, end)
            data = [slot[begin:finish] for begin, finish in bounds]
        elif share is not None:
            data = PlacedTensors(view, end, places, share.heap, offset, (share, responder))
        else:
            data = PackedTensors(view(offset, end), places)
            self._lend_heap(text, known)
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
            if token in self.answers.exchanges.received:
                responder.send(failure)
        responder.is_accepted = True

    def _lend_heap(self, text: int, known: _Head) -> None:
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
            if number >= MOST_HEAPS or not self._send_file(share.heap.open_for_writing()):
                return
            self._shares[number] = share
            heap.on_closed[self] = functools.partial(self._heap_ended, heap, number)
        known.lent_heap = heap
        share_number = self._shares[number].number
        self._end.post_entry(entries.LENT, number, text=text, place=known.index, nbytes=share_number)

    def _send_file(self, descriptor: int) -> bool:
        """Send a descriptor and close it here. Returns False if the socket is full or the front end has gone."""
        try:
            send_with_descriptors(self._connection, FRONT_MESSAGE, (descriptor,), socket.MSG_DONTWAIT)
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
        self.post(entries.FORGET, number)

    def post(self, kind: int, number: int = 0, last: bool = False) -> None:
        """Post an entry without a content."""
        self.answers.post(kind, number, last)

    # All calls but inference.

    def _begin_call(self, number: int, place: int, content: memoryview, is_checked: bool) -> None:
        """Begin a forwarded call. `is_checked`: the front end has decided that the client may make it."""
        message_at = ABOUT.size + ABOUT.unpack_from(content)[0]
        method, texts, peer = json.loads(bytes(content[ABOUT.size : message_at]))
        message = content[message_at:]
        metadata = [(key, text.encode("latin-1") if key.endswith("-bin") else text) for key, text in texts]
        call = ForwardedCall(self.answers, number, place, method, peer, metadata, message)
        self.answers.exchanges.receive(number, call)
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
        self.answers.close()
        for share in self._shares.values():
            share.heap.on_closed.pop(self, None)
        self._shares.clear()
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
    places: TensorPlaces
    index: int
    """See Text."""
    lent_heap: SharedHeap | None = None
    """The heap into which the front end must put the inputs; None = its own heap."""
