"""Writes batches for a worker: copies their requests' inputs and makes the messages (`links/README.md`)."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rocserve.core.memo import Memo
from rocserve.core.plain import to_json
from rocserve.core.requests import Member, RequestForm
from rocserve.core.tensor_places import PlacedTensors, ScatteredTensors, aligned, padded
from rocserve.core.tensors import Buffer
from rocserve.links import entries
from rocserve.links.entries import BATCH_ENTRY, ENTRY, REQUEST
from rocserve.links.files import PassedFiles
from rocserve.links.tensors import checked
from rocserve.links.texts import LARGEST_REMEMBERED, REMEMBERED, SentTexts, Text
from rocserve.plane.guarded_mapping import GuardedFile
from rocserve.plane.heap import COPIED_AT_ONCE, HeapReader, SharedHeap, Slot, fill
from rocserve.workers.results import BatchOutcome


@dataclass(slots=True, eq=False)
class SentBatch:
    """A batch that was posted to a worker, or waits to be posted."""

    id: int
    entry: bytes
    is_grouped: bool
    sizes: tuple[int, ...]
    on_outcome: Callable[[BatchOutcome], None]
    slot: Slot
    """The slot of the batch's table and inputs; it goes back to the heap when this object is deleted."""
    placed: Sequence[PlacedTensors | ScatteredTensors]
    """Inputs elsewhere in the heap, in clients' files or in other workers' heaps, kept until the batch is done."""
    view: memoryview
    large: Sequence[tuple[int, Buffer]]
    """Parts that must still be copied into the slot, with their offsets."""
    posted: int = 0
    """The work ring's `posted`, in bytes, after this batch's entry; 0 = not posted yet."""
    sent_ns: int = field(default_factory=time.monotonic_ns)


class BatchWriter:
    """Writes the batches of one instance. On one thread."""

    def __init__(self, inputs: SharedHeap, files: PassedFiles | None, heaps: PassedFiles | None) -> None:
        """`files`: for requests that lie in a client's file or another worker's heap; None = they are copied. `heaps`:
        for single inputs in other workers' heaps; None = they are copied."""
        self._inputs = inputs
        self._files = files
        self._heaps = heaps
        self._texts = Memo[bytes, Text]()
        """Request layouts by their JSON. Forms of equal JSON share a text, because the worker gathers requests of one
        layout faster."""
        self._forms = Memo[RequestForm, Text]()
        self._sent = SentTexts(REMEMBERED)
        self._batch_ids = itertools.count(1)

    def write(
        self, members: Sequence[Member], is_grouped: bool, on_outcome: Callable[[BatchOutcome], None]
    ) -> SentBatch:
        """Write a batch, except for its large inputs. `is_grouped`: its requests run one by one. Raises ServeError:
        INTERNAL if the inputs do not fit their shapes, RESOURCE_EXHAUSTED if the heap has no room."""
        inputs, forms, pack = self._inputs, self._forms, BATCH_ENTRY.pack
        fresh: list[Text] = []
        sizes: list[int] = []
        table: list[bytes] = []
        pieces: list[Buffer] = []
        placed: list[PlacedTensors | ScatteredTensors] = []
        large, end = b"", 0
        try:
            for form, data, number, details in members:
                text = forms.get(form)
                if text is None or not text.number:
                    text, json = self._text_of(form)
                    if json and json != large:
                        if len(json) > LARGEST_REMEMBERED:
                            large = json
                        else:
                            self._sent.keep(text, self._sent.take_number())
                            fresh.append(text)
                        table.append(pack(entries.TEXT, 0, 0, text.number, 0, 0, end, len(json)))
                        pieces += padded((json,))
                        end += aligned(len(json))
                sizes.append(form.layout.rows)
                flags, place = 0, end
                if type(data) is PlacedTensors and data.sizes == form.places.sizes:
                    if data.heap is inputs:
                        flags = entries.PLACED
                    elif self._files is not None and isinstance(data.heap, GuardedFile | HeapReader):
                        number = self._files.number(data.heap)
                        flags = entries.IN_FILE if number else 0
                    if flags:
                        place = data.offset
                        placed.append(data)
                if not flags:
                    of_member, nbytes = form.places.packed(data), form.places.end
                    if of_member is None:
                        of_member, nbytes = form.places.pieces(data)
                    elif type(data) is ScatteredTensors and (named := self._named(data)):
                        table += named.values()
                        placed.append(data)
                        of_member = padded([one for index, one in enumerate(data) if index not in named])
                        nbytes = sum(map(len, of_member))
                    pieces += of_member
                    end += nbytes
                table.append(pack(REQUEST, flags, 0, text.number, number, place, end, len(details)))
                if details:
                    pieces += padded((details,))
                    end += aligned(len(details))
            start = entries.data_start(len(table))
            slot, view = inputs.place(start + end)
        except BaseException:
            for text in fresh:
                if text.number:
                    self._sent.give_up(text)
            raise
        batch_id, nbytes = next(self._batch_ids), len(table) * ENTRY.size
        flags = entries.WHOLE if is_grouped else 0
        entry = ENTRY.pack(entries.BATCH, flags, 0, 0, batch_id, slot.offset, nbytes)
        if nbytes < start:
            table.append(bytes(start - nbytes))
        later = fill(view, [*table, *pieces], COPIED_AT_ONCE)
        return SentBatch(batch_id, entry, is_grouped, tuple(sizes), on_outcome, slot, placed, view, later)

    def _named(self, data: ScatteredTensors) -> dict[int, bytes]:
        """Return the entries of the inputs that the worker may read in other workers' heaps, by the inputs' indices."""
        entries_of: dict[int, bytes] = {}
        if self._heaps is not None:
            for index, (heap, offset) in data.elsewhere.items():
                number = self._heaps.number(heap) if isinstance(heap, HeapReader) else 0
                if number:
                    entries_of[index] = BATCH_ENTRY.pack(entries.INPUT, 0, index, 0, number, offset, 0, 0)
        return entries_of

    def _text_of(self, form: RequestForm) -> tuple[Text, bytes]:
        """Return the text of a form's layout, and its JSON if it must be sent."""
        json = checked(to_json(form.layout))
        text = self._texts.get(json) or Text()
        if len(json) <= LARGEST_REMEMBERED:
            self._texts.keep(json, text)
            self._forms.keep(form, text)
        return text, b"" if text.number else json
