"""What a request must say to be taken into a sequence. Codes and texts are Triton's."""

from __future__ import annotations

import itertools

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.model_config import ModelConfig
from rocserve.core.request_prefix import request_prefix
from rocserve.core.requests import InferRequest
from rocserve.core.sequences import NO_SEQUENCE, SequenceId, SequenceTag
from rocserve.core.validation import InputPlan, RequestPlan


class Admission:
    """One model's."""

    def __init__(self, config: ModelConfig, correlation_id: InputPlan | None) -> None:
        """`correlation_id`: the input that tells the model the sequence's id, where it has one."""
        batching = config.sequence_batching
        self._model = config.name
        self._correlation_id = correlation_id
        self._iterative = batching is not None and batching.iterative
        self._numbers = itertools.count(1)

    def tag(self, request: InferRequest, plan: RequestPlan) -> SequenceTag:
        """
        Raises:
            ServeError: INVALID_ARGUMENT.
        """
        tag = request.sequence or NO_SEQUENCE
        if plan.batch_size > 1:
            raise invalid_argument(
                f"inference request to model '{self._model}' must specify batch-size 1 due to requirements of sequence"
                " batcher"
            )
        if tag.id:
            self._check_type(tag.id, request.id)
            return tag
        if self._iterative:
            # Each request is a sequence of its own.
            return SequenceTag(next(self._numbers), starts=True)
        raise invalid_argument(
            f"inference request to model '{self._model}' must specify a non-zero or non-empty correlation ID"
        )

    def unknown(self, sequence: SequenceId) -> ServeError:
        """What a request is told that goes on with a sequence that never was, or has ended."""
        return invalid_argument(
            f"inference request for sequence {sequence} to model '{self._model}' must specify the START flag on the"
            " first request of the sequence"
        )

    def conflict(self, sequence: SequenceId, request_id: str) -> str:
        """What the log says of a request that starts a sequence which has not ended."""
        return (
            f"{request_prefix([request_id])}sequence {sequence} for model '{self._model}' has a conflict. The previous"
            " sequence did not end before this sequence start. Previous sequence will be terminated early."
        )

    def _check_type(self, sequence: SequenceId, request_id: str) -> None:
        control = self._correlation_id
        if control is None:
            return
        given = "BYTES" if isinstance(sequence, str) else "UINT64"
        if (control.datatype is DataType.BYTES) is not isinstance(sequence, str):
            raise invalid_argument(
                f"{request_prefix([request_id])}sequence batching control '{control.name}' data-type is"
                f" '{given}', but model '{self._model}' expects '{control.datatype.value}'"
            )
