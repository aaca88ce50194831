"""An inference request, the plan that a model version derives from it, and a model's signature, without a wire
format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rocserve.core.datatypes import DataType
from rocserve.core.errors import invalid_argument
from rocserve.core.exchange import Exchange
from rocserve.core.model_config import NO_PURPOSE, Purpose
from rocserve.core.padding import NO_PADDING, Bucket, Padding
from rocserve.core.parameters import (
    NO_PARAMETERS,
    QUEUE_PARAMETERS,
    RESERVED_PREFIX,
    TIMING,
    Parameters,
    ParameterValue,
)
from rocserve.core.sequences import SequenceKey, SequenceTag
from rocserve.core.statistics import PhaseTotals
from rocserve.core.tensor_places import TensorPlaces
from rocserve.core.tensors import Buffer, TensorHead
from rocserve.core.timing import RequestTiming
from rocserve.core.trace import Trace

SHARED_REGION = "shared_memory_region"
SHARED_OFFSET = "shared_memory_offset"
SHARED_BYTE_SIZE = "shared_memory_byte_size"
"""Parameters of a tensor in a client's shared memory."""
_SHARED_MEMORY = frozenset((SHARED_REGION, SHARED_OFFSET, SHARED_BYTE_SIZE))

MOST_ENTRIES = 16384
"""Inputs, outputs, dimensions and parameters of a request: the work for each of them delays other requests."""
LONGEST_ID = 1 << 16
"""Bytes; the id goes into errors, log lines and workers' batches."""


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


@dataclass(frozen=True, slots=True)
class InputHead:
    """Name, datatype and shape of a request's input."""

    name: str
    datatype: str
    """The client's text; validation compares it with the model's datatype."""
    shape: tuple[int, ...]
    parameters: Parameters = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """An output that a request asks for."""

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
    """Whether the inputs are typed elements, in the protocol's fields for each datatype."""
    references: frozenset[str] = frozenset()
    """The inputs whose data are References. Only the server sets this and `reference_outputs`, never a client."""
    reference_outputs: frozenset[str] = frozenset()
    """The outputs that may be References."""
    uses_shared_memory: bool = field(init=False)
    """Whether a tensor's parameters refer to a client's shared memory."""
    has_strings: bool = field(init=False)
    """Whether an input claims to be BYTES."""
    wants_timing: bool = field(init=False)
    """Whether the client asks for the times of its request."""
    is_small: bool = field(init=False)
    """Whether the head and values computed from it may be cached: a client may send thousands of large heads."""

    def __post_init__(self) -> None:
        given = [*(entry.parameters for entry in self.inputs), *(output.parameters for output in self.outputs)]
        uses = any(parameters and not _SHARED_MEMORY.isdisjoint(parameters) for parameters in given)
        object.__setattr__(self, "uses_shared_memory", uses)
        object.__setattr__(self, "has_strings", any(entry.datatype == DataType.BYTES.value for entry in self.inputs))
        object.__setattr__(self, "wants_timing", self.parameters.get(TIMING) is True)
        described = repr((self.inputs, self.outputs, self.parameters))
        object.__setattr__(self, "is_small", len(described) <= 32 << 10)


def client_parameters(head: RequestHead) -> dict[str, ParameterValue]:
    """Return the client's own parameters, which only the model reads."""
    return {
        name: value
        for name, value in head.parameters.items()
        if name not in QUEUE_PARAMETERS and not name.startswith(RESERVED_PREFIX)
    }


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


@dataclass(frozen=True, slots=True)
class InputPlan:
    """An input that passed the checks."""

    name: str
    datatype: DataType
    shape: tuple[int, ...]
    """The shape as the model sees it: with the batch dimension, reshaped."""
    element_count: int
    nbytes: int
    """The length that the data must have; -1 for BYTES, whose elements are counted instead."""
    is_reference: bool = False
    """The data are References: one per row of the model's tensor."""

    @property
    def head(self) -> TensorHead:
        """Return the head as it travels to the worker."""
        if self.is_reference:
            return TensorHead(self.name, DataType.BYTES, (self.element_count,))
        return TensorHead(self.name, self.datatype, self.shape)


@dataclass(frozen=True, eq=False)
class RequestPlan:
    """Everything that a model version derives from a request's head, computed once for equal heads."""

    batch_size: int
    """Size of the first dimension; 1 for a model that does not batch."""
    inputs: tuple[InputPlan, ...]
    """In the order of the request's data."""
    batch_key: tuple[tuple[str, DataType, tuple[int, ...]], ...]
    """Equal for requests that may share a batch: names, datatypes, shapes (no batch dimension; ragged: none; padded
    dimensions: -1)."""
    outputs: tuple[str, ...]
    """The requested outputs, each once."""
    classifications: Mapping[str, int]
    """Output -> requested number of classes."""
    priority: int
    """0 = the model's default level."""
    timeout_microseconds: int
    """0 = no timeout."""
    parameters: Parameters
    """The client's own parameters, for a model that sees single requests; otherwise empty."""
    reference_outputs: tuple[str, ...] = ()
    """As in RequestHead."""
    is_small: bool = True
    """As in RequestHead."""
    bucket: Bucket | None = None
    """None = nothing is padded."""
    real_elements: int = 0
    """Elements of the inputs that are padded, as the client sends them."""

    @cached_property
    def work(self) -> int:
        """Return the engine's work for the request: its rows, or the equivalent rows of the smallest bucket."""
        return self.batch_size if self.bucket is None else self.batch_size * self.bucket.row_work

    @cached_property
    def input_bytes(self) -> list[int]:
        return [entry.nbytes for entry in self.inputs]

    @cached_property
    def nbytes(self) -> int:
        """Return the bytes of all inputs; 0 if the size differs between requests."""
        return 0 if -1 in self.input_bytes else sum(self.input_bytes)

    @cached_property
    def form(self) -> RequestForm:
        heads = tuple(entry.head for entry in self.inputs)
        references = tuple(
            TensorHead(entry.name, entry.datatype, entry.shape) for entry in self.inputs if entry.is_reference
        )
        more = (self.priority, self.timeout_microseconds, self.parameters, references, self.reference_outputs)
        return RequestForm(RequestLayout(heads, self.outputs, self.batch_size, *more))

    @property
    def is_cacheable(self) -> bool:
        """Return whether no input or output is on a GPU, in memory that is soon reused."""
        return not self.reference_outputs and not any(entry.is_reference for entry in self.inputs)


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
    """The rate limiter's record of the instance whose model makes the request, directly or through an ensemble; None =
    a client makes it, or there is no limiter."""
    timing: RequestTiming | None = None
    """Takes the times of the request, for its client; None = nobody asks for them."""
    members: object = None
    """The members of the ensemble whose step makes the request; None = a step that has found its member by name, or
    something else, makes it."""
    member: Any = None
    """The ServedVersion that runs the request unless it is cold; None = the one that the head names."""

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

    @property
    def sequence_key(self) -> SequenceKey | None:
        """Return the sequence to which the request belongs; None = it belongs to none."""
        return None if self.sequence is None else (self.head.model_name, self.sequence.id)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A model's input or output. The shape has the batch dimension, and -1 for each variable dimension."""

    name: str
    datatype: DataType
    shape: tuple[int, ...]
    any_rank: bool = False
    """The model does not declare the number of dimensions; the shape is then (-1,)."""
    labels: tuple[str, ...] = ()
    """The output's class names, if the model knows them."""
    dimension_names: tuple[str, ...] = field(default=(), compare=False)
    """The file's name of each dimension, "" for one without a name; empty = the file names none. Equal names are equal
    sizes. Tensors that fit each other may have different names."""


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
