"""The form of a request for its worker: one layout for all of a head, and where their inputs lie in a slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rocserve.core.request_parameters import QUEUE_PARAMETERS, RESERVED_PREFIX
from rocserve.core.requests import NO_PARAMETERS, Parameters, RequestHead
from rocserve.core.tensor_places import TensorPlaces
from rocserve.core.tensors import Buffer, TensorHead


@dataclass(frozen=True, slots=True)
class RequestLayout:
    """All of a request but its id, its sequence and its data. It travels as JSON, once for all requests alike."""

    inputs: tuple[TensorHead, ...]
    requested_outputs: tuple[str, ...]
    rows: int
    """Of the first dimension; 1 where the model does not batch."""
    priority: int = 0
    timeout_microseconds: int = 0
    parameters: Parameters = field(default_factory=lambda: NO_PARAMETERS)
    """The client's own."""
    references: tuple[TensorHead, ...] = ()
    """Those of the inputs that are References, as their model sees them; `inputs` has them as they travel."""
    may_stay: tuple[str, ...] = ()
    """The outputs that may be References."""


class RequestForm:
    """A layout as both ends keep it: with the places of its inputs. Compared by identity."""

    __slots__ = ("layout", "places")

    def __init__(self, layout: RequestLayout) -> None:
        self.layout = layout
        self.places = TensorPlaces(layout.inputs)


Member = tuple[RequestForm, Sequence[Buffer], int, bytes]
"""A request of a batch: its form; the data of its inputs in the form's order, views of bytes; and where the model sees
each request for itself, its number and its details (`workers/entries.py`)."""


def client_parameters(head: RequestHead) -> dict[str, bool | int | float | str]:
    """Those of a request's head that are the client's own."""
    return {
        name: value
        for name, value in head.parameters.items()
        if name not in QUEUE_PARAMETERS and not name.startswith(RESERVED_PREFIX)
    }
