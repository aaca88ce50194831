"""The requests, sequences and slots of one model version, as its table arranges them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rocserve.core.exchange import Exchange
from rocserve.core.requests import InferRequest, RequestPlan
from rocserve.core.sequences import NO_SEQUENCE, SequenceId, SequenceTag
from rocserve.core.tensors import Buffer, Tensor
from rocserve.scheduling.response_sequencer import ResponseSequencer
from rocserve.workers.instance import Instance


@dataclass(slots=True, eq=False)
class SequenceRequest(InferRequest):
    """A request of a sequence, in the scheduler."""

    tag: SequenceTag = NO_SEQUENCE
    live: LiveSequence | None = None
    """The sequence in which the request waits or runs; None before and after."""
    original: tuple[Sequence[Buffer], RequestPlan] | None = None
    """The client's data, and the plan, without controls and states; None as long as these are not added."""

    @classmethod
    def of(cls, request: InferRequest, tag: SequenceTag, exchange: Exchange, now_ns: int) -> SequenceRequest:
        """Make the scheduler's copy of a validated request."""
        own = cls(
            request.head,
            request.id,
            request.data,
            request.deadline,
            request.in_turn,
            request.trace,
            request.phases,
            request.sequence,
            request.data_owner,
            timing=request.timing,
            tag=tag,
        )
        own.plan, own.nbytes, own.exchange, own.queue_start_ns = request.plan, request.nbytes, exchange, now_ns
        return own

    @property
    def slot(self) -> SequenceSlot:
        """Return the slot that the request's sequence has been given."""
        assert self.live is not None and self.live.slot is not None, "its sequence has a slot"
        return self.live.slot


@dataclass(slots=True, eq=False)
class LiveSequence:
    """A sequence that takes more requests, or that has ended but has requests that wait or run."""

    id: SequenceId
    restarts: bool = False
    """It began before the previous sequence of its id had ended, and gets that sequence's slot."""
    queue: deque[SequenceRequest] = field(default_factory=deque)
    slot: SequenceSlot | None = None
    """None = the sequence waits for a slot, or until the previous sequence of its id has left its slot."""
    states: list[Tensor] | None = None
    """In the order of the configuration, with a batch dimension of 1 if the model batches."""
    has_ended: bool = False
    """The sequence takes no more requests: it leaves its slot when its last one, with the END flag, begins to run, or
    otherwise when that one is done."""


@dataclass(slots=True, eq=False)
class SequenceSlot:
    """A slot of an instance, for one sequence at a time."""

    instance: SequenceInstance
    index: int
    live: LiveSequence | None = None
    running: SequenceRequest | None = None
    """The request of the slot that runs, maybe the last of an earlier sequence: the next must wait."""


@dataclass(slots=True, eq=False)
class SequenceInstance:
    """An instance with the slots of its sequences."""

    worker: Instance
    number: int
    slot_count: int
    """The most sequences at a time."""
    slots: list[SequenceSlot] = field(default_factory=list)
    """Made when needed: all slots that have had a sequence, and the next one."""
    ready: dict[SequenceSlot, None] = field(default_factory=dict)
    """The slots in which a request waits and nothing runs, in the order in which they became ready."""
    is_answering: bool = False
    """A batch is being answered: the next one is formed after that."""
    sequencer: ResponseSequencer | None = None
    """None = responses need no order."""
