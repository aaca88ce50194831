"""A response, and the other answers to a request, independent of any wire format."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rocserve.core.errors import ServeError
from rocserve.core.parameters import NO_PARAMETERS, Parameters
from rocserve.core.tensors import Buffer, Tensor, TensorHead, heads_of

LARGE_RESPONSE = 16 << 20
"""Bytes of outputs. From this size on the front ends copy outputs in steps."""


class ResponseHead(NamedTuple):
    """The part that many responses of a model share. A tuple, because it is the key of many caches."""

    model_name: str
    model_version: str
    outputs: tuple[TensorHead, ...]


@dataclass(slots=True, eq=False)
class InferResponse:
    """An answer to a request, or one of several."""

    head: ResponseHead
    id: str
    data: Sequence[Buffer]
    """The bytes of `head.outputs`, in their order."""
    parameters: Parameters = field(default_factory=lambda: NO_PARAMETERS)
    is_large: bool = False
    """Whether the data are so large that they are copied in steps."""
    slot: object = None
    """Keeps the memory of `data` from being reused while this object lives; None = the data have their own memory. With
    a slot the data are valid during the responder's call, or, for a large response, while this object lives. Release it
    soon: the model may be waiting for the memory."""
    in_shared_memory: Collection[str] = ()
    """The outputs that were written to the client's shared memory: their data are empty, only their heads are sent."""
    is_typed: bool = False
    """Whether the outputs are sent as typed elements, in the protocol's fields for each datatype."""

    @classmethod
    def of(
        cls,
        model_name: str,
        model_version: str,
        request_id: str,
        outputs: Iterable[Tensor],
        parameters: Parameters = NO_PARAMETERS,
    ) -> InferResponse:
        tensors = list(outputs)
        heads = heads_of(tensors)
        data = [tensor.data for tensor in tensors]
        return cls(ResponseHead(model_name, model_version, heads), request_id, data, parameters)

    @property
    def outputs(self) -> list[Tensor]:
        return [Tensor(*head, data) for head, data in zip(self.head.outputs, self.data, strict=True)]


Answer = InferResponse | ServeError | None
"""A response, an error, or None: no further response comes (only from decoupled models)."""
