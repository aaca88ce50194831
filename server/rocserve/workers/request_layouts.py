"""What batches and their requests are to whoever runs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rocserve.core.request_form import RequestForm
from rocserve.core.tensors import Buffer


@dataclass(frozen=True, slots=True)
class BatchForm:
    """What a batch is beside its requests."""

    cuts: Mapping[str, Sequence[tuple[int, ...]]] | None = None
    """By output, the shape of each request's part, where outputs are not cut by rows."""
    is_grouped: bool = False
    """The requests travel together and run one by one."""


@dataclass(slots=True)
class Member:
    """A request of a batch. Not frozen because one is made for each request."""

    form: RequestForm
    data: Sequence[Buffer]
    """Of its inputs, in the order of the form's; views of bytes."""
    number: int = 0
    """Its own, where the model sees each request for itself."""
    details: bytes = b""
    """See `request_details.py`."""
