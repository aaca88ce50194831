"""Items without a batch dimension, as AMD Inference Server's clients send them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rocserve.amd_inference_server.single_items import SingleItems
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.exchange import Exchange
from rocserve.core.model_config import InputConfig, ModelConfig, OutputConfig
from rocserve.core.requests import InferRequest, InputHead, RequestHead
from rocserve.core.responses import Answer, InferResponse
from rocserve.core.tensors import encode_bytes_elements, tensor_from_numpy


class Answers:
    """A responder that records its responses."""

    def __init__(self) -> None:
        self.responses: list[InferResponse] = []
        self.errors: list[str] = []

    def expect_many(self) -> None: ...

    def send(self, answer: Answer, final: bool = True) -> None:
        if isinstance(answer, ServeError):
            self.errors.append(answer.text)
        elif answer is not None:
            self.responses.append(answer)

    def watch_cancellation(self, callback: Callable[[], None]) -> None: ...


def config(*dims: tuple[int, ...], max_batch_size: int = 8, datatype: DataType = DataType.FP32) -> ModelConfig:
    return ModelConfig(
        name="m",
        backend="onnx",
        max_batch_size=max_batch_size,
        inputs=tuple(InputConfig(f"IN{index}", datatype, one) for index, one in enumerate(dims)),
        outputs=(OutputConfig("OUT", DataType.FP32, (2,)),),
    )


def request(
    *inputs: tuple[str, tuple[int, ...]], typed: bool = False, datatype: str = "FP32", data: bytes = b""
) -> InferRequest:
    heads = tuple(InputHead(name, datatype, shape) for name, shape in inputs)
    return InferRequest(RequestHead("m", "", heads, is_typed=typed), "id", [data] * len(inputs))


def shapes(taken: InferRequest) -> list[tuple[int, ...]]:
    return [entry.shape for entry in taken.head.inputs]


def taken_by(items: SingleItems, sent: InferRequest) -> InferRequest:
    """The request as the model sees it."""
    return items.take(sent, Exchange(Answers()))


def answer(items: SingleItems, sent: InferRequest) -> InferResponse:
    answers = Answers()
    outputs = [tensor_from_numpy("OUT", np.zeros((1, 2), np.float32))]
    items.take(sent, exchange := Exchange(answers))
    exchange.send(InferResponse.of("m", "1", "id", outputs))
    return answers.responses[0]


@pytest.mark.parametrize(
    ("dims", "max_batch_size", "sent", "seen", "is_item"),
    [
        ([(3, 4)], 8, [(3, 4)], [(1, 3, 4)], True),
        ([(3, 4)], 8, [(2, 3, 4)], [(2, 3, 4)], False),
        ([(4,), (2, 2)], 8, [(4,), (2, 2)], [(1, 4), (1, 2, 2)], True),
        ([(4,), (2, 2)], 8, [(4,), (1, 2, 2)], [(4,), (1, 2, 2)], False),
        ([(1, 3, 4)], 0, [(3, 4)], [(1, 3, 4)], True),
        ([(1, 3, 4)], 0, [(1, 3, 4)], [(1, 3, 4)], False),
        ([(5, 3, 4)], 0, [(3, 4)], [(3, 4)], False),
    ],
)
def test_items_become_batches_of_one_and_their_answers_items(
    dims: list[tuple[int, ...]],
    max_batch_size: int,
    sent: list[tuple[int, ...]],
    seen: list[tuple[int, ...]],
    is_item: bool,
) -> None:
    items = SingleItems(config(*dims, max_batch_size=max_batch_size))
    whole = request(*((f"IN{index}", shape) for index, shape in enumerate(sent)))
    for _ in range(2):
        # Again for another version, when the first is ending.
        assert shapes(taken_by(items, whole)) == seen
    response = answer(items, whole)
    assert response.outputs[0].shape == ((2,) if is_item else (1, 2))


def test_an_only_input_may_have_any_name() -> None:
    only = taken_by(SingleItems(config((4,))), request(("input0", (4,))))
    assert [entry.name for entry in only.head.inputs] == ["IN0"]
    several = taken_by(SingleItems(config((4,), (4,))), request(("input0", (4,)), ("IN1", (4,))))
    assert [entry.name for entry in several.head.inputs] == ["input0", "IN1"]


def test_bytes_of_the_length_of_their_element_are_one_element() -> None:
    items = SingleItems(config((1,), datatype=DataType.BYTES))
    one = request(("IN0", (5,)), datatype="BYTES", data=encode_bytes_elements([b"image"]))
    assert shapes(taken_by(items, one)) == [(1, 1)]
    several = request(("IN0", (5, 1)), datatype="BYTES", data=encode_bytes_elements([b"a"] * 5))
    assert shapes(taken_by(items, several)) == [(5, 1)]


def test_a_file_may_be_sent_as_a_row_of_uint8() -> None:
    items = SingleItems(config((1,), datatype=DataType.BYTES))
    sent = request(("input0", (5,)), datatype="UINT8", data=b"image")
    taken = taken_by(items, sent)
    head = taken.head.inputs[0]
    assert (head.name, head.datatype, head.shape) == ("IN0", "BYTES", (1, 1))
    assert (taken.data, sent.data) == ([encode_bytes_elements([b"image"])], [b"image"])
    assert answer(items, sent).outputs[0].shape == (2,)


def test_who_sends_typed_contents_is_answered_so() -> None:
    items = SingleItems(config((4,)))
    assert answer(items, request(("IN0", (4,)), typed=True)).is_typed
    assert answer(items, request(("IN0", (1, 4)), typed=True)).outputs[0].shape == (1, 2)
    assert not answer(items, request(("IN0", (4,)))).is_typed


def test_equal_requests_go_on_having_one_head() -> None:
    items = SingleItems(config((4,)))
    first = request(("IN0", (4,)))
    second = InferRequest(first.head, "other", first.data)
    assert taken_by(items, first).head is taken_by(items, second).head
