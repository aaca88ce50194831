"""What becomes of a batch in a worker, and the memory that it lies in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rocserve.core.errors import ServeError
from rocserve.core.requests import NO_PARAMETERS, Parameters
from rocserve.core.tensors import Tensor
from rocserve.workers.batch_outputs import OutputCuts, OutputLayout
from rocserve.workers.memory import Arena, ArenaFile

_NO_OUTPUTS = OutputLayout((), 0)


class Slot:
    """A batch's place: its memory and who waits for it."""

    __slots__ = ("batch_id", "cuts", "index", "input_arena", "on_outcome", "output_arena", "request_sizes", "sent_ns")

    def __init__(self, index: int, memory: ArenaFile) -> None:
        self.index = index
        self.input_arena = Arena(memory, 2 * index)
        self.output_arena = Arena(memory, 2 * index + 1)
        self.batch_id = 0
        self.sent_ns = 0
        """time.monotonic_ns() when the batch was about to be sent."""
        self.request_sizes: tuple[int, ...] = ()
        self.cuts: OutputCuts | None = None
        self.on_outcome: Callable[[BatchOutcome], None] | None = None

    def close(self) -> None:
        self.input_arena.close()
        self.output_arena.close()


class SlotOwner(Protocol):
    """Whose slot it is."""

    def put_back(self, slot: Slot) -> None:
        """A slot may be used again."""


class BatchOutcome:
    """What became of a batch; valid until `release`. Given to its callback on the completion thread."""

    __slots__ = (
        "_layout",
        "_owner",
        "_slot",
        "_view",
        "compute_end_ns",
        "error",
        "failures",
        "input_end_ns",
        "output_start_ns",
    )

    def __init__(
        self,
        owner: SlotOwner,
        slot: Slot,
        error: ServeError | None,
        times: tuple[int, int, int],
        layout: OutputLayout = _NO_OUTPUTS,
        view: memoryview | None = None,
    ) -> None:
        self._owner = owner
        self._slot: Slot | None = slot
        self._layout = layout
        self._view = view
        self.error = error
        """Set when the whole batch failed."""
        self.failures = layout.failures
        """Single requests that failed, by their place in the batch."""
        # time.monotonic_ns() when the engine began, when it ended, and when the outputs lay in shared memory.
        self.input_end_ns, self.output_start_ns, self.compute_end_ns = times

    def outputs_of(self, request_index: int) -> list[Tensor]:
        """One request's rows of each output, as views on shared memory."""
        view = self._view
        assert view is not None, "a batch that failed has no outputs"
        return [
            Tensor(name, datatype, shape, view[begin:end])
            for name, datatype, shape, begin, end in self._layout.slices[request_index]
        ]

    def is_open(self, request_index: int) -> bool:
        """Whether the model answers the request, or has answered it, over its conversation."""
        return request_index in self._layout.open_requests

    def parameters_of(self, request_index: int) -> Parameters:
        """What the model says beside the outputs of its response to a request."""
        return self._layout.parameters.get(request_index, NO_PARAMETERS)

    def release(self) -> None:
        """The slot may be used again; the tensors given out must no longer be. May be called twice."""
        slot, self._slot = self._slot, None
        if slot is not None:
            self._view = None
            self._owner.put_back(slot)
