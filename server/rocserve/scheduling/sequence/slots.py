"""Where sequences are: slots of instances, and the backlog of those that wait for one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rocserve.core.requests import InferRequest
from rocserve.core.sequences import NO_SEQUENCE, SequenceId, SequenceTag
from rocserve.core.tensors import Buffer
from rocserve.core.validation import RequestPlan
from rocserve.scheduling.queue import RequestQueue
from rocserve.scheduling.response_sequencer import ResponseSequencer
from rocserve.scheduling.sequence.states import SequenceStates
from rocserve.workers.instance import Instance

if TYPE_CHECKING:
    from rocserve.scheduling.sequence.responder import SequenceResponder


@dataclass(slots=True, eq=False)
class SequenceRequest(InferRequest):
    """A request of a sequence model on its way."""

    @classmethod
    def of(cls, request: InferRequest, tag: SequenceTag) -> SequenceRequest:
        """The request as the model's scheduler keeps it."""
        return cls(
            request.head,
            request.id,
            request.data,
            request.deadline,
            request.in_turn,
            request.trace,
            request.phases,
            request.sequence,
            request.data_owner,
            tag=tag,
        )

    tag: SequenceTag = NO_SEQUENCE
    slot: Slot | None = None
    """Where it runs or has run; None while it waits in the backlog."""
    states: SequenceStates | None = None
    """Those that its answer changes."""
    cancelled: bool = False
    """Its client has gone."""
    answers: SequenceResponder | None = None
    """Takes its answers on their way; follows the request when it is to run once more."""
    bare: tuple[Sequence[Buffer], RequestPlan] | None = None
    """Its data and its plan as they came, once controls and states have been added."""


@dataclass(slots=True, eq=False)
class Slot:
    """A place for one sequence at a time on an instance."""

    instance: SequenceInstance
    index: int
    queue: deque[SequenceRequest] = field(default_factory=deque)
    """Of the sequence that has it; a request leaves when it is to run."""
    sequence: SequenceId | None = None
    states: SequenceStates | None = None
    busy: bool = False
    """A request of it is under way: the next must wait. That may be the last of the sequence before."""
    forced_end: bool = False
    """No more requests of its sequence come: it is free once those that are there have run."""


@dataclass(slots=True, eq=False)
class SequenceInstance:
    """An instance of the model with its slots."""

    worker: Instance
    """Where it runs."""
    number: int
    slot_count: int
    """How many sequences it may have at once."""
    slots: list[Slot] = field(default_factory=list)
    """Those that sequences have come for, and the next."""
    candidates: RequestQueue | None = None
    """What its slots have handed to its dynamic batcher (oldest strategy)."""
    gone: bool = False
    answering: bool = False
    """A batch of it is being answered: the next is formed when all its requests are."""
    sequencer: ResponseSequencer | None = None
    """Of its responses, where their order is to be kept."""


@dataclass(slots=True, eq=False)
class Backlog:
    """The requests of a sequence that has no slot yet."""

    sequence: SequenceId
    queue: deque[SequenceRequest] = field(default_factory=deque)


Place = Slot | Backlog
