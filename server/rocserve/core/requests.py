"""An inference request, its parameters and its response, independent of any wire format. Error texts are Triton's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.model_config import NO_PURPOSE, Purpose
from rocserve.core.padding import NO_PADDING, Padding
from rocserve.core.sequences import SequenceTag
from rocserve.core.tensor_places import TensorPlaces
from rocserve.core.tensors import Buffer, Tensor, TensorHead, heads_of
from rocserve.core.trace import Trace

if TYPE_CHECKING:
    from rocserve.core.exchange import Exchange
    from rocserve.core.statistics import PhaseTotals
    from rocserve.core.validation import RequestPlan

ParameterValue = bool | int | float | str
Parameters = Mapping[str, ParameterValue]

NO_PARAMETERS: Parameters = {}

LARGE_RESPONSE = 16 << 20
"""Bytes of outputs. From this size on the front ends copy outputs in steps."""

SHARED_REGION = "shared_memory_region"
SHARED_OFFSET = "shared_memory_offset"
SHARED_BYTE_SIZE = "shared_memory_byte_size"
"""Parameters of a tensor in a client's shared memory."""
_LARGEST_REMEMBERED = 32 << 10
"""Limit of `is_small`, in characters of the head's repr."""
_SHARED_MEMORY = frozenset((SHARED_REGION, SHARED_OFFSET, SHARED_BYTE_SIZE))

EXPECTED_TYPES: Mapping[str, str] = {
    "priority": "int64_param or uint64_param.",
    "timeout": "int64_param.",
    "classification": "int64_param",
    "triton_enable_empty_final_response": "bool_param.",
}
"""Parameter -> its types, in the words of Triton's error text."""

MOST_ENTRIES = 16384
"""Inputs, outputs, dimensions and parameters of a request: the work for each of them delays other requests."""
LONGEST_ID = 1 << 16
"""Bytes; the id goes into errors, log lines and workers' batches."""
QUEUE_PARAMETERS = frozenset({"priority", "timeout"})
"""Parameters that decide about a request's position in the queue."""
RESERVED_PREFIX = "triton_"
"""The protocol reserves names with this prefix."""
_ALLOWED = "triton_enable_empty_final_response"


def parameters_key(parameters: Parameters) -> str:
    """Return a key that is equal only for equal parameters of equal types; 1, 1.0 and True themselves are equal."""
    return str(parameters) if parameters else ""


def check_entries(count: int) -> None:
    """Raises ServeError (INVALID_ARGUMENT) if there are too many inputs, outputs, dimensions and parameters."""
    if count > MOST_ENTRIES:
        raise invalid_argument(
            f"a request may have {MOST_ENTRIES} inputs, outputs, dimensions and parameters together, got {count}"
        )


def check_id(nbytes: int) -> None:
    """Check the length of a request's id. Raises ServeError (INVALID_ARGUMENT) if it is too long."""
    if nbytes > LONGEST_ID:
        raise invalid_argument(f"a request's id may have {LONGEST_ID} bytes, got {nbytes}")


def check_request_parameters(parameters: Parameters) -> None:
    """Check types and values of a request's parameters. Raises ServeError (INVALID_ARGUMENT)."""
    for name, value in parameters.items():
        if name in QUEUE_PARAMETERS:
            if isinstance(value, bool) or not isinstance(value, int):
                raise _wrong_type(name)
            if value < 0:
                raise invalid_argument(f"invalid value for '{name}', expected value >= 0.")
        elif name == _ALLOWED:
            if not isinstance(value, bool):
                raise _wrong_type(name)
        elif name.startswith(RESERVED_PREFIX):
            raise invalid_argument(
                f"parameter keys starting with '{RESERVED_PREFIX}' are reserved for Triton usage. Only the following"
                f" keys starting with '{RESERVED_PREFIX}' are allowed: {_ALLOWED}"
            )


def class_count(parameters: Parameters) -> int:
    """Return the number of classes to return; 0 = the tensor itself. Raises ServeError (INVALID_ARGUMENT)."""
    value = parameters.get("classification")
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong_type("classification")
    if value <= 0:
        raise invalid_argument("invalid value for 'classification' parameter, expected >= 0")
    return value


def _wrong_type(name: str) -> ServeError:
    return invalid_argument(f"invalid value type for '{name}' parameter, expected {EXPECTED_TYPES[name]}")


@dataclass(frozen=True, slots=True)
class InputHead:
    name: str
    datatype: str
    """The client's text; validation compares it with the model's datatype."""
    shape: tuple[int, ...]
    parameters: Parameters = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    name: str
    parameters: Parameters = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class RequestHead:
    """A request without id and data. Clients repeat their heads, so a front end may use one object for many requests,
    and values may be cached by the head's identity; heads are not compared by their fields."""

    model_name: str
    model_version: str
    """"" = the model's highest ready version."""
    inputs: tuple[InputHead, ...]
    outputs: tuple[RequestedOutput, ...] = ()
    """Empty = all outputs of the model."""
    parameters: Parameters = field(default_factory=dict)
    is_typed: bool = False
    """Whether the inputs came as typed elements, in the protocol's fields for each datatype."""
    references: frozenset[str] = frozenset()
    """The inputs whose data are References. Only the server sets this and `reference_outputs`, never a client."""
    reference_outputs: frozenset[str] = frozenset()
    """The outputs that may be References."""
    uses_shared_memory: bool = field(init=False)
    """Whether a tensor's parameters refer to a client's shared memory."""
    has_strings: bool = field(init=False)
    """Whether an input claims to be BYTES."""
    is_small: bool = field(init=False)
    """Whether the head and values computed from it may be cached: a client may send thousands of large heads."""

    def __post_init__(self) -> None:
        given = [*(entry.parameters for entry in self.inputs), *(output.parameters for output in self.outputs)]
        uses = any(parameters and not _SHARED_MEMORY.isdisjoint(parameters) for parameters in given)
        object.__setattr__(self, "uses_shared_memory", uses)
        object.__setattr__(self, "has_strings", any(entry.datatype == DataType.BYTES.value for entry in self.inputs))
        said = repr((self.inputs, self.outputs, self.parameters))
        object.__setattr__(self, "is_small", len(said) <= _LARGEST_REMEMBERED)


def client_parameters(head: RequestHead) -> dict[str, ParameterValue]:
    """Return the client's own parameters, which only the model reads."""
    return {
        name: value
        for name, value in head.parameters.items()
        if name not in QUEUE_PARAMETERS and not name.startswith(RESERVED_PREFIX)
    }


@dataclass(slots=True, eq=False, weakref_slot=True)
class InferRequest:
    """An inference request, from its message to its answer. Not frozen: a frozen dataclass takes longer to create."""

    head: RequestHead
    id: str
    data: Sequence[Buffer]
    """The bytes of `head.inputs`, usually views of the client's message; empty for shared memory until it is copied."""
    deadline: float | None = None
    """time.monotonic() seconds after which the client no longer waits."""
    in_turn: bool = False
    """Whether the request belongs to a stream, whose answers go out in the order of its requests."""
    trace: Trace | None = None
    """Trace that records the request's times; None = not traced."""
    phases: PhaseTotals | None = None
    """Sums to which the times of the request's execution are added; None = not needed."""
    sequence: SequenceTag | None = None
    """None = the request has no sequence parameters. The head's parameters never include them."""
    data_owner: object = None
    """Keeps the memory of `data` alive."""
    element_faults: Sequence[str] | None = None
    """For each input, the result of `tensors.count_elements`; None = the elements are not counted yet."""
    caller: object = None
    """The rate limiter's record of the instance whose model makes the request, itself or through an ensemble; None = a
    client makes it, or there is no limiter."""

    # Validation sets the next two.
    plan: RequestPlan = field(init=False)
    nbytes: int = field(init=False)
    """Bytes of all inputs."""

    # The scheduler sets the fields below.
    exchange: Exchange = field(init=False)
    queue_start_ns: int = field(init=False)
    """time.monotonic_ns() when the scheduler queued the request."""
    expires_at: float | None = field(default=None, init=False)
    """time.monotonic() seconds after which the request must not start; None = never."""
    level: int = field(default=0, init=False)
    """The priority level, 1 = highest; 0 if the model has no levels."""
    may_be_overtaken: bool = field(default=False, init=False)
    """Whether the client has set a deadline and newer requests may overtake the request."""
    on_reschedule: Callable[[InferRequest], None] | None = field(default=None, init=False)
    """Called with the request if the model reschedules it; None = the model may not reschedule."""


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
number and its details (`links/details.py`)."""


class ResponseHead(NamedTuple):
    """The part that many responses of a model share. A tuple, because it is the key of many caches."""

    model_name: str
    model_version: str
    outputs: tuple[TensorHead, ...]


@dataclass(slots=True, eq=False)
class InferResponse:
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
        data = [each.data for each in tensors]
        return cls(ResponseHead(model_name, model_version, heads), request_id, data, parameters)

    @property
    def outputs(self) -> list[Tensor]:
        return [Tensor(*head, data) for head, data in zip(self.head.outputs, self.data, strict=True)]


Answer = InferResponse | ServeError | None
"""A response, an error, or None: no further response comes (only from decoupled models)."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A model's input or output. The shape has the batch dimension, and -1 for each variable dimension."""

    name: str
    datatype: DataType
    shape: tuple[int, ...]
    any_rank: bool = False
    """The model does not say how many dimensions the tensor has; the shape is then (-1,)."""
    labels: tuple[str, ...] = ()
    """The output's class names, if the model knows them."""
    dimension_names: tuple[str, ...] = field(default=(), compare=False)
    """The file's name of each dimension, "" for one without a name; empty = the file names none. Equal names are equal
    sizes. Tensors that fit each other may have other names."""


@dataclass(frozen=True, slots=True)
class Signature:
    """An engine's description of a loaded model."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    supports_batching: bool
    """Whether the first dimension of every input and output may have any size."""
    optional_inputs: frozenset[str] = frozenset()
    ragged_inputs: frozenset[str] = frozenset()
    """Inputs whose shape may differ between the requests of a batch (allow_ragged_batch)."""
    max_batch_size: int | None = None
    """The model's limit, or the size that it asks for, if the configuration sets none; None = the backend's default."""
    dynamic_batching: bool = False
    """Whether the model asks for a dynamic batcher."""
    decoupled: bool = False
    """Whether the model asks to send any number of responses to a request."""
    purpose: Purpose = NO_PURPOSE
    dependent_rows: str = ""
    """Why requests must not be joined although the shapes allow it: rows depend on each other, or that is unknown; "" =
    they may be joined."""
    padding: Padding = NO_PADDING
