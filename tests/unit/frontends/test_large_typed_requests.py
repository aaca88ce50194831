"""Requests with large typed contents, from a client to the service: smaller requests overtake them, sequences keep
their order, errors are returned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import pytest
from support.waiting import PATIENCE_SECONDS, wait_until

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.private_paths import PrivatePaths
from rocserve.core.request_memory import RequestMemory
from rocserve.core.requests import InferRequest
from rocserve.core.responses import InferResponse
from rocserve.core.steps import Steps
from rocserve.core.tensors import Tensor
from rocserve.frontends.grpc.codec import TypedRequest
from rocserve.frontends.grpc.inference import InferenceHandlers
from rocserve.frontends.grpc.transport import full_name
from rocserve.plane import loop
from rocserve.plane.loop import PlaneLoop
from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.services.inference import ClientResponder

LARGE = 1 << 20
"""Elements."""


@dataclass(eq=False)
class Service:
    """Answers each request immediately with its inputs."""

    plane: PlaneLoop
    paths: PrivatePaths = field(default_factory=lambda: PrivatePaths(()))
    ids: list[str] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)

    def infer(self, request: InferRequest, client: ClientResponder) -> None:
        self.ids.append(request.id)
        tensors = [
            Tensor(head.name, DataType(head.datatype), head.shape, data)
            for head, data in zip(request.head.inputs, request.data, strict=True)
        ]
        response = InferResponse.of("m", "1", request.id, tensors)
        response.is_typed = request.head.is_typed
        client.send(response)

    def refuse(self, error: ServeError, find_id: Callable[[], str]) -> None:
        self.refused.append((error.text, find_id()))


@pytest.fixture
def service(plane: PlaneLoop) -> Service:
    return Service(plane)


@pytest.fixture
def handlers(service: Service, monkeypatch: pytest.MonkeyPatch) -> InferenceHandlers:
    """Run one step of long work in each turn."""
    monkeypatch.setattr(loop, "_STEPS_SECONDS", 0.0)
    return InferenceHandlers(service, RequestMemory())  # type: ignore[arg-type]


@pytest.fixture
def served(serve: Any, handlers: InferenceHandlers) -> Any:
    return serve(handlers.routes({}), handlers.memory)


@pytest.fixture
def after(service: Service, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`after(id)` delays the decoding of large requests until the request with this id has arrived."""

    def hold(request_id: str) -> None:
        def patient(typed_request: TypedRequest, admit: Callable[[int], object]) -> Steps[InferRequest]:
            while "large" in typed_request.request.id and request_id not in service.ids:
                yield
            return (yield from decode(typed_request, admit))

        decode = TypedRequest.decode
        monkeypatch.setattr(TypedRequest, "decode", patient)

    return hold


def typed(request_id: str, count: int, sequence: int = 0) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name="m", id=request_id)
    message.inputs.add(name="I", datatype="INT32", shape=[count]).contents.int_contents.extend([-1, *range(count - 1)])
    if sequence:
        message.parameters["sequence_id"].int64_param = sequence
        message.parameters["sequence_start"].bool_param = False
        message.parameters["sequence_end"].bool_param = False
    return message


def streamed(served: Any, *messages: pb.ModelInferRequest) -> Iterator[pb.ModelStreamInferResponse]:
    stream = served.stream(full_name("ModelStreamInfer"))
    texts = iter([message.SerializeToString() for message in messages])
    return map(pb.ModelStreamInferResponse.FromString, stream(texts, timeout=PATIENCE_SECONDS))


def test_a_large_request_comes_whole_and_so_does_its_answer(served: Any) -> None:
    unary = served.unary(full_name("ModelInfer"))
    message = typed("large", LARGE).SerializeToString()
    answer = pb.ModelInferResponse.FromString(unary(message, timeout=PATIENCE_SECONDS))
    assert answer.id == "large"
    assert np.array_equal(answer.outputs[0].contents.int_contents, [-1, *range(LARGE - 1)])


def test_others_go_before_and_the_answers_of_a_stream_keep_their_order(
    served: Any, service: Service, after: Callable[[str], None]
) -> None:
    after("small")
    answers = [*streamed(served, typed("large", LARGE), typed("small", 3))]
    assert [answer.infer_response.id for answer in answers] == ["large", "small"]
    assert service.ids == ["small", "large"]
    assert answers[0].infer_response.raw_output_contents[0][:12] == np.array([-1, 0, 1], np.int32).tobytes()


def test_a_sequence_keeps_its_order(
    served: Any, service: Service, handlers: InferenceHandlers, after: Callable[[str], None]
) -> None:
    after("2")
    messages = [
        typed("1 large", LARGE, 1),
        typed("1 small", 3, 1),
        typed("1 large again", LARGE, 1),
        typed("1 last", 3, 1),
        typed("2", 3, 2),
    ]
    assert len([*streamed(served, *messages)]) == len(messages)
    assert service.ids == ["2", "1 large", "1 small", "1 large again", "1 last"]
    assert not handlers.order.held


@pytest.mark.parametrize("is_streamed", [False, True])
def test_contents_that_are_none_are_refused(served: Any, service: Service, is_streamed: bool) -> None:
    message = typed("bad", LARGE, 5)
    data = message.SerializeToString()
    tensor = message.inputs[0].SerializeToString()
    # The last number is cut off.
    end = data.index(tensor) + len(tensor)
    bad = data[: end - 1] + b"\x80" + data[end:]
    text = "the request is not a valid inference.ModelInferRequest: field 'inputs' at byte"
    if is_streamed:
        stream = served.stream(full_name("ModelStreamInfer"))
        answers = [*stream(iter([bad, typed("good", 3, 5).SerializeToString()]), timeout=PATIENCE_SECONDS)]
        first, second = map(pb.ModelStreamInferResponse.FromString, answers)
        assert text in first.error_message and second.infer_response.id == "good"
    else:
        with pytest.raises(grpc.RpcError) as raised:
            served.unary(full_name("ModelInfer"))(bad, timeout=PATIENCE_SECONDS)
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert text in raised.value.details()
    wait_until(lambda: len(service.refused) == 1)


def test_a_large_request_that_is_more_than_the_memory_is_refused(serve: Any, service: Service) -> None:
    memory = RequestMemory(3 * LARGE)
    handlers = InferenceHandlers(service, memory)  # type: ignore[arg-type]
    served = serve(handlers.routes({}), handlers.memory)
    message = pb.ModelInferRequest(model_name="m")
    message.inputs.add(name="I", datatype="INT64", shape=[LARGE]).contents.int64_contents.extend([1] * LARGE)
    with pytest.raises(grpc.RpcError) as raised:
        served.unary(full_name("ModelInfer"))(message.SerializeToString(), timeout=PATIENCE_SECONDS)
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "this request takes" in raised.value.details()
    wait_until(lambda: memory.used_bytes == 0)
    assert not service.ids
