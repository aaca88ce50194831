"""An inference request and its response, free of any wire format."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.sequences import SequenceTag
from rocserve.core.tensors import Buffer, Tensor, TensorHead, heads_of
from rocserve.core.trace import Trace

if TYPE_CHECKING:
    from rocserve.core.serving import Responder
    from rocserve.core.statistics import PhaseTotals
    from rocserve.core.validation import RequestPlan

ParameterValue = bool | int | float | str
Parameters = Mapping[str, ParameterValue]

NO_PARAMETERS: Parameters = {}

LARGE_RESPONSE = 16 << 20
"""Bytes of outputs from which on they are copied in steps."""

SHARED_REGION = "shared_memory_region"
SHARED_OFFSET = "shared_memory_offset"
SHARED_BYTE_SIZE = "shared_memory_byte_size"
"""The parameters of a tensor that lies in a client's shared memory."""
_LARGEST_REMEMBERED = 32 << 10
"""Characters of a head, written out."""
_SHARED_MEMORY = frozenset((SHARED_REGION, SHARED_OFFSET, SHARED_BYTE_SIZE))


def parameters_key(parameters: Parameters) -> str:
    """Of parameters that are the same, also in the kinds of their values: 1, 1.0 and True are equal to each other."""
    return str(parameters) if parameters else ""


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


@dataclass(frozen=True, slots=True, eq=False)
class RequestHead:
    """All of a request but its id and its data. Clients send the same head again and again; a front end may hand out
    one object for all of them, and what is worked out from a head may be remembered by the head's identity (hence no
    field-wise equality)."""

    model_name: str
    model_version: str
    """Empty: the model's highest ready version."""
    inputs: tuple[InputHead, ...]
    outputs: tuple[RequestedOutput, ...] = ()
    """Empty: all outputs of the model."""
    parameters: Parameters = field(default_factory=dict)
    is_typed: bool = False
    """Whether inputs came element by element, in fields of their datatypes."""
    references: frozenset[str] = frozenset()
    """The inputs whose data are References. Of these two no client can say anything."""
    may_stay: frozenset[str] = frozenset()
    """The outputs that may be References."""
    uses_shared_memory: bool = field(init=False)
    """Whether a tensor says that it lies in a client's shared memory."""
    has_strings: bool = field(init=False)
    """Whether an input says that it is of BYTES."""
    is_small: bool = field(init=False)
    """Whether it is to be remembered, and what is worked out from it: a client may send thousands of large ones, each
    another."""

    def __post_init__(self) -> None:
        given = [*(entry.parameters for entry in self.inputs), *(output.parameters for output in self.outputs)]
        uses = any(parameters and not _SHARED_MEMORY.isdisjoint(parameters) for parameters in given)
        object.__setattr__(self, "uses_shared_memory", uses)
        object.__setattr__(self, "has_strings", any(entry.datatype == DataType.BYTES.value for entry in self.inputs))
        said = repr((self.inputs, self.outputs, self.parameters))
        object.__setattr__(self, "is_small", len(said) <= _LARGEST_REMEMBERED)


@dataclass(slots=True, eq=False, weakref_slot=True)
class InferRequest:
    """One inference request, from its message to its answer. Not frozen because one is made for each message on the hot
    path; from `submit` on, its scheduler marks it."""

    head: RequestHead
    id: str
    data: Sequence[Buffer]
    """The bytes of `head.inputs`, in their order; views on the client's own message. Of those in shared memory, none
    until they have been fetched."""
    deadline: float | None = None
    """time.monotonic() seconds after which the client no longer waits."""
    in_turn: bool = False
    """It is one of a stream, whose answers go out in the order of their requests."""
    trace: Trace | None = None
    """Where it is written down when what happened to the request; None = it is not traced."""
    phases: PhaseTotals | None = None
    """Where it is added up what its execution took; None = nobody asks."""
    sequence: SequenceTag | None = None
    """None = it says nothing of a sequence. Not among the head's parameters."""
    data_owner: object = None
    """The owner of the bytes: to keep `data`, keep this."""
    element_faults: Sequence[str] | None = None
    """Of each input, what `tensors.count_elements` has found; None = its elements are still to be counted."""

    # Once it has been validated; those without a value have none before.
    plan: RequestPlan = field(init=False)
    nbytes: int = field(init=False)
    """The size of its inputs."""

    # Once a scheduler has taken it.
    responder: Responder = field(init=False)
    """Who gets the answer."""
    queue_start_ns: int = field(init=False)
    """time.monotonic_ns() when the scheduler took it."""
    expires_at: float | None = field(default=None, init=False)
    """time.monotonic() seconds after which it must not run any more; None = never."""
    level: int = field(default=0, init=False)
    """Its priority level; 0 where the model has no levels, else 1 is the highest."""
    dated: bool = field(default=False, init=False)
    """Its client has said how long it waits, and it may be overtaken by newer ones."""
    waiting: bool = field(default=False, init=False)
    """It is in the queue."""
    watched: bool = field(default=False, init=False)
    """Its responder has been asked to say when the client leaves."""
    on_again: Callable[[InferRequest], None] | None = field(default=None, init=False)
    """Takes it when the model wants it once more; None = it may not."""


class ResponseHead(NamedTuple):
    """What many responses of a model have in common. A tuple, for it is what much is remembered by."""

    model_name: str
    model_version: str
    outputs: tuple[TensorHead, ...]


@dataclass(slots=True, eq=False)
class InferResponse:
    """The answer to one request."""

    head: ResponseHead
    id: str
    data: Sequence[Buffer]
    """The bytes of `head.outputs`, in their order."""
    parameters: Parameters = field(default_factory=lambda: NO_PARAMETERS)
    in_shared_memory: Collection[str] = ()
    """The outputs that have been left in the client's shared memory: their data are empty, and the client is told their
    names, datatypes and shapes."""
    is_typed: bool = False
    """The outputs are to go out element by element, in fields of their datatypes."""
    is_large: bool = False
    """Its data take long to copy, which is therefore done some at a time."""
    slot: object = None
    """None: its data have memory of their own. Else they are valid while the responder is called, and those of a large
    response for as long as somebody keeps this, which a model may wait for."""

    @classmethod
    def of(
        cls,
        model_name: str,
        model_version: str,
        request_id: str,
        outputs: Iterable[Tensor],
        parameters: Parameters = NO_PARAMETERS,
    ) -> InferResponse:
        """One whose outputs are these."""
        tensors = list(outputs)
        heads = heads_of(tensors)
        data = [each.data for each in tensors]
        return cls(ResponseHead(model_name, model_version, heads), request_id, data, parameters)

    @property
    def outputs(self) -> list[Tensor]:
        return [Tensor(*head, data) for head, data in zip(self.head.outputs, self.data, strict=True)]


Answer = InferResponse | ServeError | None
"""What a request is answered with: a response, an error in its place, or None: no further response comes, which only
decoupled models say."""


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
    """Where the configuration says nothing: the most that the model takes, or, of one that answers requests, what it
    asks for; None = the backend's default."""
    dynamic_batching: bool = False
    """Whether the model asks for a dynamic batcher."""
    decoupled: bool = False
    """Whether the model asks to answer a request with any number of responses."""
