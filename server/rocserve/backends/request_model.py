"""What a backend gives whose models see each request for itself, such as Python models.

Beside its inputs such a model sees a request's id and parameters, may answer it with tensors of any shape, with an
error or (decoupled) with any number of responses, from any thread and after `execute` has returned; and it may call
other models of the server.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rocserve.backends.base import ModelSource
from rocserve.core.custom_metrics import MetricChanges
from rocserve.core.errors import ServeError
from rocserve.core.model_config import ModelConfig
from rocserve.core.requests import NO_PARAMETERS, Parameters, Signature
from rocserve.core.tensors import Tensor


@dataclass(slots=True)
class ModelResponse:
    """One response to a request, or to a call of another model. Not frozen, as core.tensors.Tensor is not."""

    outputs: Sequence[Tensor]
    parameters: Parameters = field(default_factory=lambda: NO_PARAMETERS)
    slot: object = None
    """As InferResponse.slot; in a worker, as BatchResult.kept."""


Answer = ModelResponse | ServeError
"""What may come of a request."""


class Rescheduled(enum.Enum):
    """In an answer's place: the model wants the same request once more, in a later batch (iterative sequences)."""

    RESCHEDULED = enum.auto()


RESCHEDULED = Rescheduled.RESCHEDULED
Result = Answer | Rescheduled
"""What an execution may do with a request."""


class RequestResponder(Protocol):
    """Answers one request in `execute`'s place. From any thread, also after `execute` has returned."""

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody waits for the request's answer any more."""

    def send(self, answer: Answer | None, final: bool) -> None:
        """Send a response or an error. None with `final` ends the request without another response. Raises:
        RuntimeError: the final answer has been sent before."""


@dataclass(slots=True)
class ModelRequest:
    """One request as a model sees it. Its tensors are its own: they stay valid for as long as they are held.

    Not frozen, as core.tensors.Tensor is not.
    """

    inputs: Mapping[str, Tensor]
    """With the batch dimension where the model batches."""
    requested_outputs: tuple[str, ...]
    responder: RequestResponder
    id: str = ""
    correlation_id: int | str = 0
    flags: int = 0
    """Of a sequence: 1 = it starts here, 2 = it ends here (Triton's)."""
    priority: int = 0
    timeout_microseconds: int = 0
    """0 = none."""
    parameters: Parameters = field(default_factory=lambda: NO_PARAMETERS)
    """The client's own; what the protocol reads (priority, timeout, sequence_id, ...) is not among them."""
    number: int = 0
    """Which of the open requests it is."""
    trace_context: str = ""
    """The W3C trace context that goes on with what the model asks of others, in JSON; empty: there is none."""
    may_stay: tuple[str, ...] = ()
    """As Batch.may_stay; of outputs in the answer that `execute` returns."""


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A request to another model of the server."""

    model_name: str
    inputs: tuple[Tensor, ...]
    requested_outputs: tuple[str, ...]
    """Empty: all."""
    model_version: int = -1
    """-1 = the highest that is ready."""
    id: str = ""
    correlation_id: int | str = 0
    flags: int = 0
    priority: int = 0
    timeout_microseconds: int = 0
    parameters: Parameters = field(default_factory=lambda: NO_PARAMETERS)
    trace_number: int = 0
    """The `number` of the request that it belongs to, as far as traces go; 0 = none."""
    device: str = ""
    """The GPU (DEVICE_PROPERTY) on which the caller takes and gives references; "" = it does not."""
    references: tuple[str, ...] = ()
    """The inputs that have been sent as one reference each, for a model on that GPU."""
    may_stay: bool = False
    """Whether outputs may come as References."""


class ModelCalls(Protocol):
    """The way to the other models of the server, ensembles included."""

    def call(self, call: ModelCall, on_answer: Callable[[Result | None, bool], None]) -> None:
        """Start a call. `on_answer` gets each response, or an error, and whether it is the last; None as the last
        ends a call without another response. It is called on a thread of the worker's own and must not block. What
        References among the outputs refer to is there until it returns. RESCHEDULED: the model is not on the GPU where
        the call's references lead; the call is to be made again without them.

        From any thread; also while `execute` or another call is under way.
        """


class RequestModel(Protocol):
    """A model of such a backend, in a worker. The calls of `execute` come one after the other, on one thread."""

    @property
    def signature(self) -> Signature:
        """What the model itself says of its configuration, before `initialize`."""

    def initialize(self, config: ModelConfig, config_json: str) -> None:
        """Get ready to serve, with the completed configuration; `config_json` is all of it, as Triton writes it.
        Raises: ServeError or any exception; its text becomes the reason in the repository index."""

    def execute(self, requests: Sequence[ModelRequest]) -> Sequence[Result | None]:
        """The answer to each request, in their order; None where the request's responder answers or has answered.

        An exception fails all requests of the batch that are not answered yet; a ServeError keeps its code.
        """

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RequestModelSource:
    """What such an engine is given beside what every engine is given."""

    source: ModelSource
    config_json: str
    """The configuration as it is before completion, as Triton writes it in JSON."""
    calls: ModelCalls
    instance_name: str
    """Triton's: <model>_<group>_<instance>, e.g. "add_sub_0_0"."""
    send_metrics: Callable[[MetricChanges], None] = lambda changes: None
    """Takes what becomes of the metrics that the model defines; from any thread."""
