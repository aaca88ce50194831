"""The form of requests: what all requests with the same head share, and the places of their inputs in a slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rocserve.core.request_parameters import QUEUE_PARAMETERS, RESERVED_PREFIX
from rocserve.core.requests import NO_PARAMETERS, Parameters, RequestHead
from rocserve.core.tensor_places import TensorPlaces
from rocserve.core.tensors import Buffer, TensorHead


@dataclass(frozen=True, slots=True)
class RequestLayout:
    """A request without id, sequence and data. It travels to the worker as JSON, once per layout."""

    inputs: tuple[TensorHead, ...]
    requested_outputs: tuple[str, ...]
    rows: int
    """Size of the first dimension; 1 if the model does not batch."""
    priority: int = 0
    timeout_microseconds: int = 0
    parameters: Parameters = field(default_factory=lambda: NO_PARAMETERS)
    """Only the client's own parameters."""
    references: tuple[TensorHead, ...] = ()
    """Heads of the inputs that are References (core/device_references.py), as the model sees them; `inputs` has them as
    BYTES."""
    reference_outputs: tuple[str, ...] = ()
    """The outputs that may be References."""


class RequestForm:
    """A layout with the places of its inputs, as the server and the worker keep it. Compared by identity."""

    __slots__ = ("layout", "places")

    def __init__(self, layout: RequestLayout) -> None:
        self.layout = layout
        self.places = TensorPlaces(layout.inputs)


Member = tuple[RequestForm, Sequence[Buffer], int, bytes]
"""A request of a batch: its form, its inputs' data as views of bytes, and, if the model sees single requests, its
number and its details (`workers/entries.py`)."""


def client_parameters(head: RequestHead) -> dict[str, bool | int | float | str]:
    """Return the client's own parameters, which only the model reads."""
    return {
        name: value
        for name, value in head.parameters.items()
        if name not in QUEUE_PARAMETERS and not name.startswith(RESERVED_PREFIX)
    }
