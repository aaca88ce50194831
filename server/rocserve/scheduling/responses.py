"""From what a worker says of a request's outputs to the response that its client is told."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from rocserve.core.classification import classify
from rocserve.core.errors import ServeError, internal
from rocserve.core.model_config import ModelConfig
from rocserve.core.requests import NO_PARAMETERS, InferRequest, InferResponse, Parameters, ResponseHead
from rocserve.core.serving import Responder
from rocserve.core.tensors import Buffer, Tensor, TensorHead
from rocserve.core.validation import RequestPlan, reshape_dims
from rocserve.plane.heap import copied

_REMEMBERED_FORMS = 1024


def send_copied(response: InferResponse, final: bool, responder: Responder) -> Generator[None, None, None]:
    """Hand a large response to a responder, on memory of its own: some is copied at a step."""
    try:
        data = yield from copied(response.data)
    except ServeError as error:
        responder.fail(error, final)
    else:
        responder.send(replace(response, data=data, slot=None), final)


class _Form(NamedTuple):
    """What responses are made of outputs that are alike."""

    head: ResponseHead
    wanted: Sequence[int] | None
    """Which of the outputs; None: all of them."""


class ResponseMaker:
    """Makes responses of one model version."""

    def __init__(self, config: ModelConfig, version: int) -> None:
        self._name = config.name
        self._version = str(version)
        self._batching = config.max_batch_size > 0
        self._outputs = {output.name: output for output in config.outputs}
        self._forms: dict[tuple[RequestPlan, tuple[TensorHead, ...]], _Form] = {}
        # Those of a batch are mostly the same.
        self._last_plan: RequestPlan | None = None
        self._last_heads: tuple[TensorHead, ...] | None = None
        self._last_form = _Form(ResponseHead(self._name, self._version, ()), None)

    def make(
        self,
        entry: InferRequest,
        heads: tuple[TensorHead, ...],
        data: Sequence[Buffer],
        parameters: Parameters = NO_PARAMETERS,
    ) -> InferResponse:
        """The response to a request, of all outputs that it wants.

        Raises:
            ServeError: an output is not what the configuration says of it.
        """
        plan = entry.plan
        try:
            if heads is not self._last_heads or plan is not self._last_plan:
                self._last_form = self._forms.get((plan, heads)) or self._form(plan, heads)
                self._last_plan, self._last_heads = plan, heads
            form = self._last_form
            if form.wanted is not None:
                data = [data[index] for index in form.wanted]
            response = InferResponse(form.head, entry.id, data, parameters)
            if plan.classifications:
                outputs = [self._classified(tensor, plan.classifications) for tensor in response.outputs]
                response = InferResponse.of(self._name, self._version, entry.id, outputs, parameters)
        except ServeError:
            raise
        except Exception as error:
            # A worker may say anything of its outputs, and its client is to be answered all the same.
            raise internal(f"the model's outputs make no response: {error!r}") from error
        return response

    def _form(self, plan: RequestPlan, heads: tuple[TensorHead, ...]) -> _Form:
        wanted = [index for index, head in enumerate(heads) if head.name in plan.outputs]
        outputs = tuple([self._reshaped(heads[index]) for index in wanted])
        if len(self._forms) >= _REMEMBERED_FORMS:
            self._forms.clear()
        head = ResponseHead(self._name, self._version, outputs)
        form = self._forms[plan, heads] = _Form(head, wanted if len(wanted) < len(heads) else None)
        return form

    def _reshaped(self, head: TensorHead) -> TensorHead:
        config = self._outputs.get(head.name)
        if config is None or config.reshape is None:
            return head
        lead = head.shape[:1] if self._batching else ()
        if len(head.shape) != len(config.reshape) + len(lead):
            raise internal(
                f"output '{head.name}' has the shape {list(head.shape)}, expected {len(config.reshape) + len(lead)}"
                f" dimensions, for the configuration reshapes it from {list(config.reshape)}"
            )
        return head._replace(shape=(*lead, *reshape_dims(head.shape[len(lead) :], config.reshape, config.dims)))

    def _classified(self, tensor: Tensor, classifications: Mapping[str, int]) -> Tensor:
        count = classifications.get(tensor.name, 0)
        if not count:
            return tensor
        return classify(tensor, count, self._outputs[tensor.name].labels, self._batching)
