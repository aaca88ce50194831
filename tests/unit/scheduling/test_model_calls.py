"""Calls whose tensors are on a GPU, as the server forwards them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rocserve.backends.request_model import RESCHEDULED, ModelCall, ModelResponse
from rocserve.core.datatypes import DataType
from rocserve.core.device_references import DEVICE_PROPERTY, DeviceReference, pack_references, references_of
from rocserve.core.dispatch import Dispatcher
from rocserve.core.model_config import InstanceGroup, InstanceKind, ModelConfig, OutputConfig
from rocserve.core.requests import InferRequest
from rocserve.core.responses import InferResponse
from rocserve.core.serving import ServedModel, ServingTable, ServingTableHolder
from rocserve.core.tensors import Tensor
from rocserve.scheduling.model_calls import start_call
from rocserve.workers.instance_requests import OpenCall

WHOLE = DeviceReference(b"handle", 0, 512, 0, DataType.FP32, (2, 4))


class Called:
    name, version = "called", 1

    def __init__(self, device: str, rows: int) -> None:
        self.properties = {DEVICE_PROPERTY: device}
        self.config = ModelConfig(
            name="called",
            max_batch_size=rows,
            outputs=(OutputConfig("y", DataType.FP32, (4,)), OutputConfig("text", DataType.BYTES, (1,))),
            instance_groups=(InstanceGroup("g", InstanceKind.GPU, 1, (0,)),),
        )
        self.requests: list[InferRequest] = []

    def infer(self, request: InferRequest, responder: Any) -> None:
        self.requests.append(request)
        rows = [DeviceReference(b"other", 0, 512, 16 * row, DataType.FP32, (4,)) for row in range(2)]
        y = pack_references("y", rows if self.config.max_batch_size else [WHOLE])
        given = y if "y" in request.head.reference_outputs else Tensor("y", DataType.FP32, (2, 4), bytes(32))
        response = InferResponse.of("called", "1", "", [Tensor("text", DataType.BYTES, (1,), bytes(4)), given])
        response.slot = "slot"
        responder.send(response)


def answer_of(called: Called) -> tuple[Any, int]:
    """The response that the caller's worker receives, and how many of its first tensors are references."""
    answers: list[tuple[Any, int]] = []

    def answer_call(number: int, answer: Any, final: bool, references: int = 0) -> None:
        answers.append((answer, references))

    tables = ServingTableHolder()
    tables.table = ServingTable({"called": ServedModel("called", {1: called}, called)})
    instance: Any = SimpleNamespace(answer_call=answer_call)
    slot: Any = None
    call = ModelCall(
        "called", (pack_references("x", [WHOLE]),), (), device="GPU-0", references=("x",), accepts_references=True
    )
    start_call(Dispatcher(tables, lambda steps: None), call, OpenCall(instance, 1, slot))
    [answer] = answers
    return answer


@pytest.mark.parametrize("rows", [0, 8])
def test_references_go_to_a_model_on_the_gpu_and_come_back(rows: int) -> None:
    called = Called("GPU-0", rows)
    answer, references = answer_of(called)
    [request] = called.requests
    assert (request.head.references, request.head.reference_outputs) == ({"x"}, {"y"})
    assert (request.head.inputs[0].datatype, request.head.inputs[0].shape) == ("FP32", (2, 4))
    sent = references_of(Tensor("x", DataType.FP32, (2, 4), request.data[0]))
    assert [(one.offset, one.shape) for one in sent] == ([(0, (4,)), (16, (4,))] if rows else [(0, (2, 4))])
    assert isinstance(answer, ModelResponse)
    assert ([tensor.name for tensor in answer.outputs], references, answer.slot) == (["y", "text"], 1, "slot")
    shapes = [one.shape for one in references_of(answer.outputs[0])]
    assert shapes == ([(1, 4), (1, 4)] if rows else [(2, 4)])


@pytest.mark.parametrize("device", ["", "GPU-1"])
def test_a_call_of_a_model_elsewhere_is_to_be_sent_again(device: str) -> None:
    called = Called(device, 8)
    assert answer_of(called) == (RESCHEDULED, 0)
    assert called.requests == []
