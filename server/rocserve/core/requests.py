"""An inference request and its response, free of any wire format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rocserve.core.datatypes import DataType
from rocserve.core.tensors import Buffer, Tensor
from rocserve.core.trace import Trace

ParameterValue = bool | int | float | str
Parameters = Mapping[str, ParameterValue]

NO_PARAMETERS: Parameters = {}


@dataclass(frozen=True, slots=True)
class InputHead:
    """What a request says of an input, without its data."""

    name: str
    datatype: str
    """As the client wrote it; validation compares it with the model's."""
    shape: tuple[int, ...]
    parameters: Parameters = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    name: str
    parameters: Parameters = field(default_factory=dict)

    @property
    def classification(self) -> int:
        """How many classes of the classification extension are asked for; 0 = the tensor itself."""
        value = self.parameters.get("classification", 0)
        return value if isinstance(value, int) else -1


@dataclass(frozen=True, slots=True, eq=False)
class RequestHead:
    """All of a request but its id and its data.

    Clients send the same head again and again; a front end may hand out one object for all of them, and whoever
    works out something from a head may remember it by the head's identity (hence no field-wise equality).
    """

    model_name: str
    model_version: str
    """Empty: the model's highest ready version."""
    inputs: tuple[InputHead, ...]
    outputs: tuple[RequestedOutput, ...] = ()
    """Empty: all outputs of the model."""
    parameters: Parameters = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class InferRequest:
    """One inference request. Not frozen because one is made for each message on the hot path."""

    head: RequestHead
    id: str
    data: list[Buffer]
    """The bytes of `head.inputs`, in their order; views on the client's own message."""
    deadline: float | None = None
    """time.monotonic() seconds after which the client no longer waits."""
    trace: Trace | None = None
    """Where it is written down when what happened to the request; None = it is not traced."""


@dataclass(slots=True, eq=False)
class InferResponse:
    """The answer to one request. Tensors may be views that are valid only while the responder is being called."""

    model_name: str
    model_version: str
    id: str
    outputs: list[Tensor]
    parameters: Parameters = field(default_factory=dict)
    output_parameters: Mapping[str, Parameters] | None = None
    """By output: what is said of it alone, such as the region of shared memory that it lies in."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A model's input or output: datatype and shape with -1 for what varies, batch dimension included."""

    name: str
    datatype: DataType
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Signature:
    """What an engine reports of a loaded model."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    supports_batching: bool
    """Whether the first dimension of every input and output may take any size."""
    optional_inputs: frozenset[str] = frozenset()
    max_batch_size: int | None = None
    """What the model asks for where the configuration says nothing; None = the backend's default."""
    dynamic_batching: bool = False
    """Whether the model asks for a dynamic batcher."""
    decoupled: bool = False
    """Whether the model asks to answer a request with any number of responses."""
