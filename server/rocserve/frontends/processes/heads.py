"""Heads of requests and answers, as texts of a front end's link (`links/texts.py`)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from rocserve.core.datatypes import DataType
from rocserve.core.parameters import NO_PARAMETERS, Parameters
from rocserve.core.requests import InputHead, RequestedOutput, RequestHead
from rocserve.core.responses import InferResponse, ResponseHead
from rocserve.core.tensor_places import TensorPlaces
from rocserve.core.tensors import TensorHead


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """An answer without its id and its data. Many answers have equal heads."""

    head: ResponseHead
    parameters: Parameters = field(default_factory=lambda: NO_PARAMETERS)
    in_shared_memory: tuple[str, ...] = ()
    is_typed: bool = False

    @classmethod
    def of(cls, response: InferResponse) -> AnswerHead:
        return cls(response.head, response.parameters, tuple(response.in_shared_memory), response.is_typed)


def input_places(head: RequestHead) -> TensorPlaces:
    """Return where the inputs of requests with this head lie; if a datatype does not exist, with a table of sizes."""
    try:
        return TensorPlaces([TensorHead(one.name, DataType(one.datatype), one.shape) for one in head.inputs])
    except ValueError:
        return TensorPlaces([TensorHead(one.name, DataType.BYTES, one.shape) for one in head.inputs])


def write_head(head: RequestHead) -> bytes:
    inputs = [(one.name, one.datatype, one.shape, dict(one.parameters)) for one in head.inputs]
    outputs = [(one.name, dict(one.parameters)) for one in head.outputs]
    fields = (head.model_name, head.model_version, inputs, outputs, dict(head.parameters), head.is_typed)
    return json.dumps(fields).encode()


def read_head(text: bytes) -> RequestHead:
    name, version, inputs, outputs, parameters, is_typed = json.loads(text)
    return RequestHead(
        name,
        version,
        tuple(InputHead(name, datatype, tuple(shape), given) for name, datatype, shape, given in inputs),
        tuple(RequestedOutput(name, given) for name, given in outputs),
        parameters,
        is_typed,
    )
