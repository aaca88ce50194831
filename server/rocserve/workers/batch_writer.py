"""Writes batches for a worker: copies their requests' inputs and makes the messages (`entries.py`)."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rocserve.core.memo import Memo
from rocserve.core.plain import to_json
from rocserve.core.requests import Member, RequestForm
from rocserve.core.tensor_places import PlacedTensors, aligned, padded
from rocserve.core.tensors import Buffer
from rocserve.plane.guarded_mapping import GuardedFile
from rocserve.plane.heap import COPIED_AT_ONCE, HeapReader, SharedHeap, Slot, fill
from rocserve.plane.link import ENTRY_BYTES
from rocserve.workers import entries
from rocserve.workers.entries import ENTRY, PLACED_REQUEST, REQUEST, REQUEST_ENTRY
from rocserve.workers.layouts import checked
from rocserve.workers.passed_files import PassedFiles
from rocserve.workers.results import BatchOutcome


@dataclass(slots=True, eq=False)
class SentBatch:
    """A batch that was posted to a worker, or waits to be posted."""

    id: int
    entry: bytes
    sizes: tuple[int, ...]
    on_outcome: Callable[[BatchOutcome], None]
    slot: Slot
    """The slot of the batch's table and inputs; it goes back to the heap when this object is deleted."""
    placed: Sequence[PlacedTensors]
    """Inputs elsewhere in the heap, in clients' files or in other workers' heaps, kept until the batch is done."""
    view: memoryview
    large: Sequence[tuple[int, Buffer]]
    """Parts that must still be copied into the slot, with their offsets."""
    posted: int = 0
    """The work ring's `posted`, in bytes, after this batch's entry; 0 = not posted yet."""
    sent_ns: int = field(default_factory=time.monotonic_ns)


class BatchWriter:
    """Writes the batches of one instance. On one thread."""

    def __init__(self, inputs: SharedHeap, files: PassedFiles | None) -> None:
        """`files`: None = the worker may read no clients' files and no other workers' heaps."""
        self._inputs = inputs
        self._files = files
        self._forms = Memo[RequestForm, int](entries.REMEMBERED_LAYOUTS)
        """Layout numbers of the request forms that the worker knows."""
        self._texts = Memo[bytes, int](entries.REMEMBERED_LAYOUTS)
        """Numbers of the last layouts sent, by their JSON. Forms of equal JSON share a number, because the worker
        gathers requests of one layout faster."""
        self._next_layout = 0
        self._batch_ids = itertools.count(1)

    def write(
        self, members: Sequence[Member], is_grouped: bool, on_outcome: Callable[[BatchOutcome], None]
    ) -> SentBatch:
        """Write a batch, except for its large inputs. `is_grouped`: its requests run one by one. Raises ServeError:
        INTERNAL if the inputs do not fit their shapes, RESOURCE_EXHAUSTED if the heap has no room."""
        inputs, forms, pack = self._inputs, self._forms, REQUEST_ENTRY.pack
        fresh: dict[int, bytes] = {}
        sizes: list[int] = []
        table = [entries.PADDING_ENTRY]
        pieces: list[Buffer] = []
        placed: list[PlacedTensors] = []
        # Two entries are as long as a tensor's alignment; the first is for LAYOUTS.
        end = (1 + len(members) // 2) * 2 * ENTRY_BYTES
        try:
            for form, data, number, details in members:
                layout = forms.get(form)
                if layout is None:
                    layout = self._define(form, fresh)
                sizes.append(form.layout.rows)
                kind, place = REQUEST, end
                if type(data) is PlacedTensors and data.sizes == form.places.sizes:
                    if data.heap is inputs:
                        kind = PLACED_REQUEST
                    elif self._files is not None and isinstance(data.heap, GuardedFile | HeapReader):
                        number = self._files.number(data.heap)
                        kind = entries.FILE_REQUEST if number else REQUEST
                    if kind != REQUEST:
                        place = data.offset
                        placed.append(data)
                if kind == REQUEST:
                    of_member, nbytes = form.places.packed(data), form.places.end
                    if of_member is None:
                        of_member, nbytes = form.places.pieces(data)
                    pieces += of_member
                    end += nbytes
                table.append(pack(kind, layout, number, place, end, len(details)))
                if details:
                    pieces += padded((details,))
                    end += aligned(len(details))
            if fresh:
                text = b"\n".join(fresh.values())
                table[0] = pack(entries.LAYOUTS, next(iter(fresh)), 0, 0, end, len(text))
                pieces += padded((text,))
                end += aligned(len(text))
            slot, view = inputs.place(end)
        except BaseException:
            self._forget(fresh)
            raise
        if fresh:
            self._forget({n: text for n, text in fresh.items() if len(text) > entries.LARGEST_REMEMBERED_LAYOUT})
        batch_id, kind = next(self._batch_ids), entries.GROUPED_BATCH if is_grouped else entries.BATCH
        entry = ENTRY.pack(kind, 0, 0, 0, batch_id, slot.offset, len(table) * ENTRY_BYTES)
        if len(table) % 2:
            table.append(entries.PADDING_ENTRY)
        large = fill(view, [*table, *pieces], COPIED_AT_ONCE)
        return SentBatch(batch_id, entry, tuple(sizes), on_outcome, slot, placed, view, large)

    def _define(self, form: RequestForm, fresh: dict[int, bytes]) -> int:
        """Return the number of a form's layout. Adds the layout to `fresh` if the worker does not know it."""
        text = checked(to_json(form.layout))
        number = self._texts.get(text)
        if number is None:
            number = self._texts.keep(text, self._next_layout)
            fresh[number] = text
            self._next_layout = number + 1 & entries.LARGEST_LAYOUT
        return self._forms.keep(form, number)

    def _forget(self, layouts: Mapping[int, bytes]) -> None:
        """Forget layouts that the worker does not get, or does not keep."""
        for form in [form for form, number in self._forms.items() if number in layouts]:
            del self._forms[form]
        for text in [text for text, number in self._texts.items() if number in layouts]:
            del self._texts[text]
