"""What a traced request carries along."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rocserve.core.tensors import Tensor

# Triton's names.
REQUEST_START = "REQUEST_START"
QUEUE_START = "QUEUE_START"
COMPUTE_START = "COMPUTE_START"
COMPUTE_INPUT_END = "COMPUTE_INPUT_END"
COMPUTE_OUTPUT_START = "COMPUTE_OUTPUT_START"
COMPUTE_END = "COMPUTE_END"
REQUEST_END = "REQUEST_END"
TENSOR_QUEUE_INPUT = "TENSOR_QUEUE_INPUT"
TENSOR_BACKEND_OUTPUT = "TENSOR_BACKEND_OUTPUT"


class Trace(Protocol):
    """One request's trace, on the data plane's thread; only requests that were chosen for tracing have one."""

    @property
    def wants_tensors(self) -> bool:
        """Whether `note_tensors` has an effect."""

    @property
    def context(self) -> str:
        """The W3C trace context that a model may hand on, in JSON; empty: there is none."""

    def note(self, activity: str, ns: int) -> None:
        """Something happened, e.g. QUEUE_START.

        Args:
            activity: Triton's name for it.
            ns: time.monotonic_ns() when it did.
        """

    def note_run(self, queue_start: int, times: tuple[int, int, int, int]) -> None:
        """The request has been run.

        Args:
            queue_start: when it came into the queue.
            times: when its execution began, the engine began, the engine ended, the outputs were there.
        """

    def note_tensors(self, activity: str, tensors: Sequence[Tensor]) -> None:
        """Tensors passed by; their data are copied."""

    def child(self, model_name: str, model_version: str, request_id: str) -> Trace:
        """The trace of a request that this one makes, a step of an ensemble or a call by a model; it begins now."""

    def keep_open(self) -> None:
        """One more `end` is to come: somebody beside the one who answers has something to note, perhaps later."""

    def end(self) -> None:
        """Nothing follows from the caller. When all have said so, of this trace and of its relatives, it is written."""
