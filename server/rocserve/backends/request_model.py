"""Defines the contracts of backends whose models see each request separately, such as Python models. Such a model sees
a request's id and parameters, and may answer with tensors of any shape, an error, or (decoupled) any number of
responses, on any thread, and after `execute` has returned. It may also call other models of the server."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rocserve.backends.base import ModelSource
from rocserve.core.custom_metrics import MetricChanges
from rocserve.core.errors import ServeError
from rocserve.core.model_config import ModelConfig
from rocserve.core.parameters import NO_PARAMETERS, Parameters
from rocserve.core.requests import Signature
from rocserve.core.tensors import Tensor


@dataclass(slots=True)
class ModelResponse:
    """One response to a request, or to a call of another model. Not frozen: see core.tensors.Tensor."""

    outputs: Sequence[Tensor]
    parameters: Parameters = field(default_factory=lambda: NO_PARAMETERS)
    slot: object = None
    """See InferResponse.slot; in a worker, see BatchResult.kept."""


Answer = ModelResponse | ServeError
"""The final result of a request."""


class Rescheduled(enum.Enum):
    """Returned instead of an answer to get the same request again in a later batch (iterative sequences)."""

    RESCHEDULED = enum.auto()


RESCHEDULED = Rescheduled.RESCHEDULED
Result = Answer | Rescheduled
"""What an execution may return for a request."""


class RequestResponder(Protocol):
    """Answers a request if `execute` does not. From any thread, also after `execute` has returned."""

    @property
    def is_cancelled(self) -> bool:
        pass

    def send(self, answer: Result | None, final: bool) -> None:
        """Send an answer; None with `final` ends the request without another, and RESCHEDULED with `final` makes it run
        again. Raises RuntimeError after the final answer."""


@dataclass(slots=True)
class ModelRequest:
    """One request, as a model sees it. Its tensors stay valid while the model holds them, but see `reads_in_place`. Not
    frozen: see Tensor."""

    inputs: Mapping[str, Tensor]
    """With the batch dimension if the model batches."""
    requested_outputs: tuple[str, ...]
    responder: RequestResponder
    id: str = ""
    correlation_id: int | str = 0
    flags: int = 0
    """Triton's flags for a sequence: 1 = start, 2 = end."""
    priority: int = 0
    timeout_microseconds: int = 0
    """0 = no timeout."""
    parameters: Parameters = field(default_factory=lambda: NO_PARAMETERS)
    """The client's own parameters, without those that the protocol reads (priority, timeout, sequence_id, ...)."""
    number: int = 0
    """Identifies the request among the open ones."""
    trace_context: str = ""
    """The W3C trace context for the model's calls to other services, in JSON; "" = none."""
    reference_outputs: tuple[str, ...] = ()
    """See Batch.reference_outputs; for outputs in the answer that `execute` returns."""


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A request to another model of the server."""

    model_name: str
    inputs: tuple[Tensor, ...]
    requested_outputs: tuple[str, ...]
    """Empty = all."""
    model_version: int = -1
    """-1 = the highest that is ready."""
    id: str = ""
    correlation_id: int | str = 0
    flags: int = 0
    priority: int = 0
    timeout_microseconds: int = 0
    parameters: Parameters = field(default_factory=lambda: NO_PARAMETERS)
    trace_number: int = 0
    """The `number` of the request whose trace the call belongs to; 0 = none."""
    device: str = ""
    """The GPU (DEVICE_PROPERTY) on which the caller sends and receives references; "" = it does neither."""
    references: tuple[str, ...] = ()
    """Inputs that were sent as one reference each, for a model on that GPU."""
    accepts_references: bool = False
    """Outputs may come as References."""


class ModelCalls(Protocol):
    """Calls other models of the server, ensembles included."""

    def call(self, call: ModelCall, on_answer: Callable[[Result | None, bool], None]) -> None:
        """Start a call. `on_answer` gets each response or error, and whether it is the last; None as the last ends the
        call without another response. `on_answer` runs on a separate thread of the worker and must not block. Memory
        that References among the outputs lead to is valid until `on_answer` returns. RESCHEDULED means that the called
        model is not on the GPU that the call's references lead to, so the call must be made again without references.

        From any thread, also while `execute` or another call is running.
        """


class RequestModel(Protocol):
    """A model that sees each request, in a worker. Calls of `execute` come one after the other, on one thread."""

    @property
    def signature(self) -> Signature:
        """The configuration that the model itself states, before `initialize`."""

    def initialize(self, config: ModelConfig, config_json: str) -> None:
        """Prepare to serve with the completed configuration; `config_json` is all of it in Triton's JSON. Raises
        ServeError or any exception; its text becomes the reason in the repository index."""

    def execute(self, requests: Sequence[ModelRequest]) -> Sequence[Result | None]:
        """Return the answer to each request, in their order; None if its responder answers or has answered. An
        exception fails all requests of the batch that have no answer yet; a ServeError keeps its code."""

    def close(self) -> None: ...


def readiness_check(model: object) -> Callable[[], bool] | None:
    """Return an initialised model's attribute `readiness_check`, or None. It asks the model whether it is ready, on a
    separate thread, also while `execute` runs. It may raise any exception."""
    check: Callable[[], bool] | None = getattr(model, "readiness_check", None)
    return check


def reads_in_place(model: object) -> bool:
    """Return a model's attribute `reads_in_place`, or False. True gives it inputs that it may not change, and that are
    valid until `execute` returns, instead of copies."""
    reads: bool = getattr(model, "reads_in_place", False)
    return reads


@dataclass(frozen=True, slots=True)
class RequestModelSource:
    """What a model that answers single requests is loaded from."""

    source: ModelSource
    config_json: str
    """The configuration before completion, in Triton's JSON."""
    calls: ModelCalls
    instance_name: str
    """Triton's name, <group>_<instance>, such as "add_sub_0_0" if the group has no name."""
    send_metrics: Callable[[MetricChanges], None] = lambda changes: None
    """Sends changes of the metrics that the model defines. From any thread."""
