"""Where tensors lie, which has no effect on the CPU, and the trace of a request: what models may name."""

from __future__ import annotations

import enum


class MemoryType(enum.Enum):
    TRITONSERVER_MEMORY_CPU = 0
    TRITONSERVER_MEMORY_GPU = 1


class PreferredMemory:
    """Where a model would like the outputs of a call."""

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        if not isinstance(preferred_memory_type, MemoryType):
            raise TypeError(
                "preferred_memory_type must be TRITONSERVER_MEMORY_CPU or TRITONSERVER_MEMORY_GPU, got"
                f" {type(preferred_memory_type).__name__}"
            )
        self.preferred_memory_type = preferred_memory_type
        self.preferred_device_id = preferred_device_id


class InferenceTrace:
    """The trace of a request, for the requests to other models that it leads to."""

    def __init__(self, number: int = 0, context: str = "") -> None:
        self.number = number
        """Of the request; 0 = none that the model received."""
        self._context = context

    def get_context(self) -> str | None:
        """The W3C trace context in JSON, to hand on to other services; None where there is none."""
        return self._context or None
