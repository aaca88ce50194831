"""Lays out batches in the heap that the workers of a version read: a table of requests, forms that are new to the
worker, and the inputs that do not lie in the heap already."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rocserve.core.plain import to_json
from rocserve.core.request_form import Member, RequestForm
from rocserve.core.tensor_places import PlacedTensors, aligned, padded
from rocserve.core.tensors import Buffer
from rocserve.plane.guarded_mapping import GuardedFile
from rocserve.plane.heap import COPIED_AT_ONCE, Slot, fill
from rocserve.plane.link import ENTRY_BYTES
from rocserve.plane.shared_heap import SharedHeap
from rocserve.workers.client_files import GivenFiles
from rocserve.workers.entries import (
    BATCH,
    ENTRY,
    GROUPED,
    IN_FILE,
    LAYOUT,
    NO_ENTRY,
    PLACED,
    REMEMBERED_LAYOUTS,
    REQUEST,
)
from rocserve.workers.layouts import checked
from rocserve.workers.results import BatchOutcome


@dataclass(slots=True, eq=False)
class SentBatch:
    """A batch that a worker has, or is about to have."""

    id: int
    entry: bytes
    """The message to the worker."""
    sizes: tuple[int, ...]
    """Of its requests, in rows."""
    on_outcome: Callable[[BatchOutcome], None]
    slot: Slot
    """Of its table, and of inputs; the heap has it back when this goes."""
    placed: Sequence[PlacedTensors]
    """Inputs that lie elsewhere in the heap, or in clients' files."""
    view: memoryview
    """The slot."""
    large: Sequence[tuple[int, Buffer]]
    """Parts that are still to be copied into it, and where."""
    posted: int = 0
    """Where the ring of batches was behind it; 0: it has not been posted."""
    sent_ns: int = field(default_factory=time.monotonic_ns)


class BatchWriter:
    """Those of one instance. One thread."""

    def __init__(self, inputs: SharedHeap, files: GivenFiles | None) -> None:
        """`files`: None: the worker is given none."""
        self._inputs = inputs
        self._files = files
        self._forms: dict[RequestForm, int] = {}
        """The numbers of those that the worker knows."""
        self._numbers = itertools.count()
        self._batch_ids = itertools.count(1)

    def write(
        self, members: Sequence[Member], is_grouped: bool, on_outcome: Callable[[BatchOutcome], None]
    ) -> SentBatch:
        """A batch whose large inputs are still to be copied. `is_grouped`: its requests run one by one. Raises:
        ServeError: INTERNAL, the inputs are not what their shapes say; RESOURCE_EXHAUSTED, no room for them."""
        inputs, forms, pack = self._inputs, self._forms, ENTRY.pack
        fresh: dict[RequestForm, int] = {}
        for member in members:
            if member[0] not in forms and member[0] not in fresh:
                fresh[member[0]] = next(self._numbers)
        if fresh:
            forms = {**forms, **fresh}
        count = len(members) + len(fresh)
        sizes: list[int] = []
        table: list[bytes] = []
        pieces: list[Buffer] = []
        placed: list[PlacedTensors] = []
        # Two entries take as much as tensors are aligned to.
        end = (count + count % 2) * ENTRY_BYTES
        for form, number in fresh.items():
            text = checked(to_json(form.layout))
            table.append(pack(LAYOUT, 0, 0, number, end, len(text), 0))
            pieces += padded((text,))
            end += aligned(len(text))
        for form, data, number, details in members:
            sizes.append(form.layout.rows)
            flags, place = 0, end
            if type(data) is PlacedTensors and data.sizes == form.places.sizes:
                if data.heap is inputs:
                    flags = PLACED
                elif self._files is not None and isinstance(data.heap, GuardedFile):
                    number = self._files.number(data.heap)
                    flags = IN_FILE if number else 0
                if flags:
                    place = data.offset
                    placed.append(data)
            if not flags:
                of_member, nbytes = form.places.packed(data), form.places.end
                if of_member is None:
                    of_member, nbytes = form.places.pieces(data)
                pieces += of_member
                end += nbytes
            table.append(pack(REQUEST, flags, 0, forms[form], number, place, len(details) | end << 32))
            if details:
                pieces += padded((details,))
                end += aligned(len(details))
        slot, view = inputs.place(end)
        if fresh:
            # Only now: of a batch that cannot be sent the worker hears nothing.
            self._forms = forms
            while len(forms) > REMEMBERED_LAYOUTS:
                del forms[next(iter(forms))]
        if count % 2:
            table.append(NO_ENTRY)
        batch_id = next(self._batch_ids) & 0xFFFFFFFF
        entry = pack(BATCH, GROUPED if is_grouped else 0, 0, batch_id, slot.offset, count, 0)
        large = fill(view, [*table, *pieces], COPIED_AT_ONCE)
        return SentBatch(batch_id, entry, tuple(sizes), on_outcome, slot, placed, view, large)
