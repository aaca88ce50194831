"""From what a worker says of a request's outputs to the response that its client is told."""

from __future__ import annotations

from collections.abc import Mapping

from rocserve.core.classification import classify
from rocserve.core.errors import ServeError, internal
from rocserve.core.model_config import ModelConfig
from rocserve.core.requests import NO_PARAMETERS, InferResponse, Parameters
from rocserve.core.tensors import Tensor
from rocserve.core.validation import reshape_dims
from rocserve.scheduling.entry import QueuedRequest


class ResponseMaker:
    """Makes responses of one model version."""

    def __init__(self, config: ModelConfig, version: int) -> None:
        self._name = config.name
        self._version = str(version)
        self._batching = config.max_batch_size > 0
        self._outputs = {output.name: output for output in config.outputs}
        self._reshapes = any(output.reshape is not None for output in config.outputs)

    def make(self, entry: QueuedRequest, outputs: list[Tensor]) -> InferResponse:
        """The response to a request; its tensors are views on `outputs`.

        Raises:
            ServeError: an output is not what the configuration says of it.
        """
        plan = entry.plan
        try:
            if len(outputs) != len(plan.outputs):
                wanted = set(plan.outputs)
                outputs = [tensor for tensor in outputs if tensor.name in wanted]
            if self._reshapes:
                outputs = [self._reshaped(tensor) for tensor in outputs]
            if plan.classifications:
                outputs = [self._classified(tensor, plan.classifications) for tensor in outputs]
        except ServeError:
            raise
        except Exception as error:
            # A worker may say anything of its outputs, and its client is to be answered all the same.
            raise internal(f"the model's outputs make no response: {error!r}") from error
        return InferResponse(self._name, self._version, entry.request.id, outputs)

    def make_from_model(
        self, entry: QueuedRequest, outputs: list[Tensor], parameters: Parameters = NO_PARAMETERS
    ) -> InferResponse:
        """The same of what a user's model gives, which may be anything."""
        wanted = [tensor for tensor in outputs if tensor.name in entry.plan.outputs]
        if self._reshapes:
            for tensor in wanted:
                self._check_rank(tensor)
        response = self.make(entry, wanted)
        response.parameters = parameters
        return response

    def _check_rank(self, tensor: Tensor) -> None:
        reshape = self._outputs[tensor.name].reshape
        lead = 1 if self._batching else 0
        if reshape is not None and len(tensor.shape) != len(reshape) + lead:
            raise internal(
                f"output '{tensor.name}' has the shape {list(tensor.shape)}, expected {len(reshape) + lead} dimensions,"
                f" for the configuration reshapes it from {list(reshape)}"
            )

    def _reshaped(self, tensor: Tensor) -> Tensor:
        config = self._outputs[tensor.name]
        if config.reshape is None:
            return tensor
        lead = tensor.shape[:1] if self._batching else ()
        dims = reshape_dims(tensor.shape[len(lead) :], config.reshape, config.dims)
        return Tensor(tensor.name, tensor.datatype, (*lead, *dims), tensor.data)

    def _classified(self, tensor: Tensor, classifications: Mapping[str, int]) -> Tensor:
        count = classifications.get(tensor.name, 0)
        if not count:
            return tensor
        return classify(tensor, count, self._outputs[tensor.name].labels, self._batching)
