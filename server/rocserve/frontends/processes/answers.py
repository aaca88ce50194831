"""Posts the server's answers to a front end's exchanges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Never

from rocserve.core.errors import ServeError
from rocserve.core.exchange import Cancellable
from rocserve.core.memo import Memo
from rocserve.core.parameters import parameters_key
from rocserve.core.plain import to_json
from rocserve.core.responses import InferResponse, ResponseHead
from rocserve.core.tensor_places import TensorPlaces
from rocserve.core.timing import TOTAL
from rocserve.frontends.processes.heads import AnswerHead
from rocserve.frontends.processes.link_end import LARGEST_SHARED, FrontLinkEnd, numbers
from rocserve.links import entries
from rocserve.links.entries import ENTRY, failure_entry
from rocserve.links.exchanges import Exchanges
from rocserve.links.texts import REMEMBERED, SentTexts, Text
from rocserve.plane.heap import COPIED_AT_ONCE, HeapFull, HeapReader, Slot, fill

_MOST_TOGETHER = (1 << 16) - 1
"""The most requests in one RESPONSES."""


class _AnswerText(Text):
    __slots__ = ("places",)

    def __init__(self, head: ResponseHead) -> None:
        super().__init__()
        self.places = TensorPlaces(head.outputs)


class FrontAnswers:
    """Answers the exchanges of one front end, on the plane's thread. Once it has ended, answers are dropped."""

    def __init__(
        self,
        end: FrontLinkEnd,
        heap_numbers: Iterator[int],
        send_file: Callable[[int], bool],
    ) -> None:
        """`heap_numbers`: numbers for new heaps. `send_file`: sends a descriptor and closes it; returns False if the
        front end does not get it."""
        self.give_back = end.give_back
        """Takes a place in the front end's heap that is no longer read. From any thread."""
        self.wake = end.plane.wake
        self.exchanges = Exchanges[Never, Cancellable]()
        """All of them opened by the front end: the server opens none."""
        self._end = end
        self._heap_numbers = heap_numbers
        self._send_file = send_file
        self._answer_heads = Memo[object, _AnswerText]()
        self._sent_heads = SentTexts(REMEMBERED)
        self.output_heaps: dict[HeapReader, int] = {}
        """Output heap that the front end reads -> number."""

    def answer(self, token: int, response: InferResponse, final: bool) -> None:
        """Raises HeapFull."""
        if not self._end.is_open:
            return
        key: object = response.head
        if response.in_shared_memory or response.is_typed or response.parameters:
            parameters = parameters_key(response.parameters)
            key = (response.head, tuple(response.in_shared_memory), response.is_typed, parameters)
        known = self._answer_heads.get(key) or _AnswerText(response.head)
        places = known.places
        flags, packed, nbytes = entries.LAST if final else 0, places.packed(response.data), places.end
        if packed is None:
            flags |= entries.SIZED
            packed, nbytes = places.sized(response.data)
        if nbytes <= LARGEST_SHARED:
            place = self._end.place_in_turn(packed, nbytes)
            self._post_response(key, known, response, flags, token, place, nbytes)
        elif (outputs := self._outputs_in_heap(response)) is not None:
            heap, *places_and_sizes = outputs
            held = self._end.hold(response.slot, nbytes)
            table = numbers(1 + len(outputs)).pack(heap, held, *places_and_sizes)
            flags = flags & entries.LAST | entries.PLACED
            try:
                place = self._end.place_in_turn((table,), len(table))
                self._post_response(key, known, response, flags, token, place, len(table))
            except HeapFull:
                self._end.take_back(held)
                raise
        else:
            place, view = self._end.new_slot(nbytes)
            left_out = fill(view, packed, COPIED_AT_ONCE if response.is_large else nbytes)

            def post() -> None:
                # Many other answers may have been sent meanwhile, and the front end remembers only the last heads.
                now = self._answer_heads.get(key) or _AnswerText(response.head)
                try:
                    self._post_response(key, now, response, flags, token, place, nbytes)
                except HeapFull as error:
                    self._end.take_back(place)
                    self.fail(token, error, final)

            self._end.copy_then(post, view, left_out, response)
        if final:
            self.exchanges.end(token)

    def _post_response(
        self,
        key: object,
        known: _AnswerText,
        response: InferResponse,
        flags: int,
        token: int,
        place: int,
        nbytes: int,
    ) -> None:
        if not known.number:
            self._send_head(key, known, AnswerHead.of(response))
        self._end.post(ENTRY.pack(entries.RESPONSE, flags, 0, known.number, token, place, nbytes))

    def answer_together(self, head: ResponseHead, slot: Slot, nbytes: int, places: list[int]) -> bool:
        """See scheduling.batch.AnswerLink."""
        if not self._end.is_open:
            return True
        tokens = places[:: 1 + len(head.outputs)]
        if len(tokens) > _MOST_TOGETHER:
            return False
        try:
            known = self._answer_heads.get(head) or _AnswerText(head)
            if not known.number:
                self._send_head(head, known, AnswerHead(head))
            heap = self._output_heap_number(slot.heap) if slot.heap is not None else None
            if heap is None:
                return False
            held = self._end.hold(slot, nbytes)
            table = numbers(4 + len(places)).pack(heap, held, slot.offset, nbytes, *places)
            try:
                place = self._end.place_in_turn((table,), len(table))
            except HeapFull:
                self._end.take_back(held)
                return False
        except HeapFull:
            return False
        self._end.post(ENTRY.pack(entries.RESPONSES, 0, len(tokens), known.number, 0, place, len(table)))
        self.exchanges.end(*tokens)
        return True

    def _outputs_in_heap(self, response: InferResponse) -> Sequence[int] | None:
        """Return the number of the heap with the outputs, and the offset and the size of each. Returns None if they lie
        elsewhere, or if the front end cannot read the heap."""
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
        return None if number is None else (number, *found)

    def _output_heap_number(self, heap: HeapReader) -> int | None:
        """Return the number by which the front end knows an output heap; None if the front end cannot read it."""
        number = self.output_heaps.get(heap)
        if number is None:
            number = next(self._heap_numbers)
            try:
                descriptor = heap.open_for_reading()
            except OSError:
                return None
            if not self._send_file(descriptor):
                return None
            self.output_heaps[heap] = number
            heap.on_closed[self] = lambda: self.post(entries.FORGET, self.output_heaps.pop(heap))
            self.post(entries.OUTPUTS, number)
        return number

    def _send_head(self, key: object, known: _AnswerText, head: AnswerHead) -> None:
        content = to_json(head)
        # No other answer has the same times.
        remembers = not head.parameters or (len(content) <= LARGEST_SHARED and TOTAL not in head.parameters)
        self._end.send_text(self._sent_heads, known, content, remembers)
        if remembers:
            self._answer_heads.keep(key, known)

    def fail(self, token: int, error: ServeError, final: bool, refused: bool = False) -> None:
        if not self._end.is_open:
            return
        text = error.text.encode()
        place = self._end.place_in_turn((text,), len(text))
        self._end.post(failure_entry(error, final, refused, token, place, len(text)))
        if final:
            self.exchanges.end(token)

    def end(self, token: int) -> None:
        self.post(entries.END, token, last=True)
        self.exchanges.end(token)

    def post(self, kind: int, number: int = 0, last: bool = False) -> None:
        """Post an entry without a content."""
        if self._end.is_open:
            self._end.post_entry(kind, number, flags=entries.LAST if last else 0)

    # All calls but inference.

    def reply(self, number: int, message: bytes, final: bool) -> None:
        """Answer a call that is open."""
        if number not in self.exchanges.received or not self._end.is_open:
            return
        try:
            self._end.post_text(entries.RESPONSE, message, number, flags=entries.LAST if final else 0)
        except HeapFull as error:
            self.fail(number, error, True)
        if final:
            self.exchanges.end(number)

    def end_call(self, number: int, error: ServeError) -> None:
        if number in self.exchanges.received:
            self.fail(number, error, True)

    def close(self) -> None:
        """Drop all, because the front end has ended."""
        for exchange in self.exchanges.close()[1]:
            exchange.cancel()
        for outputs in self.output_heaps:
            outputs.on_closed.pop(self, None)
        self._end.drop()
