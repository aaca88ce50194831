"""The parts that the runs of an ensemble share: its steps' limits, and the making of responses from its tensors."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rocserve.core.datatypes import DataType
from rocserve.core.dispatch import Dispatcher
from rocserve.core.errors import ServeError, internal
from rocserve.core.memo import Memo
from rocserve.core.model_config import ModelConfig, OutputConfig
from rocserve.core.parameters import Parameters
from rocserve.core.request_memory import RequestMemory
from rocserve.core.requests import InferRequest
from rocserve.core.responses import LARGE_RESPONSE, InferResponse, ResponseHead
from rocserve.core.sequences import NO_SEQUENCE, SEQUENCE_END, SEQUENCE_ID, SEQUENCE_START, SequenceTag
from rocserve.core.serving import ServedVersion, ServingTable
from rocserve.core.statistics import ModelStatistics
from rocserve.core.tensors import Tensor, TensorHead, classify
from rocserve.core.validation import reshape_dims
from rocserve.scheduling.ensemble.graph import EnsembleGraph, find_member
from rocserve.scheduling.ensemble.members import EnsembleMembers


class InflightLimit:
    """Limits how many requests of a step are in flight. Each start is matched by one `end`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._running = 0
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_starting = False

    def begin(self, start: Callable[[], None], may_wait: bool = True) -> bool:
        """Call `start` now, or when earlier requests have ended. Returns False if it must wait. With the rate limiter
        calls by models do not wait here: the requests before them may need what the callers hold."""
        if may_wait and (self._waiting or self._running >= self._limit):
            self._waiting.append(start)
            return False
        self._running += 1
        start()
        return True

    def end(self) -> None:
        self._running -= 1
        if self._is_starting:
            # The request ended as soon as it was started: the loop below goes on, without recursion.
            return
        self._is_starting = True
        try:
            while self._waiting and self._running < self._limit:
                self._running += 1
                self._waiting.popleft()()
        finally:
            self._is_starting = False


@dataclass(frozen=True, slots=True)
class EnsembleParts:
    """What an ensemble's requests need to run."""

    config: ModelConfig
    version: str
    graph: EnsembleGraph
    dispatcher: Dispatcher
    memory: RequestMemory
    """Counts members' answers, like all answers, until the ensemble has answered."""
    statistics: ModelStatistics
    limits: Sequence[InflightLimit]
    """One limit for each step; empty = no limit."""
    outputs: Mapping[str, OutputConfig]
    heads: Memo[tuple[tuple[str, DataType, tuple[int, ...]], ...], ResponseHead] = field(
        default_factory=Memo, init=False, compare=False, repr=False
    )
    """Outputs as members make them -> head of the ensemble's response."""

    def response(
        self,
        request: InferRequest,
        tensors: Sequence[Tensor],
        sequence: SequenceTag,
        members: EnsembleMembers,
        steps: Sequence[ServedVersion],
    ) -> InferResponse | ServeError:
        """Return the response with these outputs, or an error if an output contradicts the configuration. `sequence`:
        the one that the members' answers name. `members`, `steps`: as in EnsembleRun."""
        try:
            if request.plan.classifications:
                classified = [self._classified(tensor, request, members, steps) for tensor in tensors]
                response = InferResponse.of(self.config.name, self.version, request.id, classified)
            else:
                made = tuple([(tensor.name, tensor.datatype, tensor.shape) for tensor in tensors])
                head = self.heads.get(made) or self._head(made, request.plan.is_small)
                response = InferResponse(head, request.id, [tensor.data for tensor in tensors])
        except ServeError as error:
            return error
        if tensors:
            # As in Triton, the answer of every ensemble names the request's sequence; 0 = none.
            response.parameters = _NO_SEQUENCE if sequence is NO_SEQUENCE else _sequence_parameters(sequence)
        response.is_large = sum([len(data) for data in response.data]) > LARGE_RESPONSE
        return response

    def _head(self, made: Sequence[tuple[str, DataType, tuple[int, ...]]], is_small: bool) -> ResponseHead:
        outputs = [TensorHead(name, datatype, self._shape(name, shape)) for name, datatype, shape in made]
        head = ResponseHead(self.config.name, self.version, tuple(outputs))
        return self.heads.keep(tuple(made), head) if is_small else head

    def _classified(
        self, tensor: Tensor, request: InferRequest, members: EnsembleMembers, steps: Sequence[ServedVersion]
    ) -> Tensor:
        name = tensor.name
        whole = Tensor(name, tensor.datatype, self._shape(name, tensor.shape), tensor.data)
        count = request.plan.classifications.get(name, 0)
        if not count:
            return whole
        labels = _labels(self.config, name, members, steps, self.dispatcher.table)
        return classify(whole, count, labels, self.config.max_batch_size > 0)

    def _shape(self, name: str, made: tuple[int, ...]) -> tuple[int, ...]:
        """Return an output's shape as the ensemble declares it. `made`: the member's."""
        config = self.outputs[name]
        batching = self.config.max_batch_size > 0
        dims = config.model_dims
        rank = len(dims) + (1 if batching else 0)
        shape = made
        if len(shape) == rank - 1:
            shape = (1, *shape)
        elif len(shape) == rank + 1 and shape[0] == 1:
            shape = shape[1:]
        if len(shape) != rank:
            raise internal(
                f"in ensemble '{self.config.name}', output '{name}' has shape {list(made)}, but the ensemble"
                f" declares {len(dims)} dimensions{' after the batch' if batching else ''}"
            )
        if config.reshape is not None:
            lead = shape[: rank - len(dims)]
            reshaped = (*lead, *reshape_dims(shape[len(lead) :], dims, config.dims))
            if math.prod(reshaped) != math.prod(shape):
                raise internal(
                    f"in ensemble '{self.config.name}', output '{name}' has shape {list(made)}, which is not"
                    f" the {list(dims)} that the ensemble reshapes"
                )
            shape = reshaped
        return shape


def _sequence_parameters(sequence: SequenceTag) -> Parameters:
    return {SEQUENCE_ID: sequence.id, SEQUENCE_START: sequence.starts, SEQUENCE_END: sequence.ends}


_NO_SEQUENCE = _sequence_parameters(NO_SEQUENCE)


def _labels(
    config: ModelConfig,
    output: str,
    members: EnsembleMembers,
    steps: Sequence[ServedVersion],
    table: ServingTable,
    depth: int = 0,
) -> tuple[str, ...]:
    """Return an output's labels; without own labels, the labels of the member that makes the output."""
    own = next((entry.labels for entry in config.outputs if entry.name == output), ())
    # At most 32 levels of ensembles within ensembles.
    if own or depth > 32:
        return own
    for index, step in enumerate(config.ensemble_steps):
        for member_output, tensor in step.output_map.items():
            if tensor == output:
                member = steps[index] if steps else find_member(step, table.models)
                if member is None:
                    return ()
                of_member = members.steps.get(member, ())
                return _labels(member.config, member_output, members, of_member, table, depth + 1)
    return ()
