"""Calls of Python models with tensors on a GPU, played by a stand-in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.python_models import FakeCalls
from support.waiting import PATIENCE_SECONDS

from rocserve.backends.python.pb_utils import tensor as tensors_module
from rocserve.backends.python.pb_utils.calls import Caller
from rocserve.backends.python.pb_utils.tensor import Tensor
from rocserve.backends.request_model import RESCHEDULED, ModelCall, ModelResponse
from rocserve.core import tensors as core
from rocserve.core.datatypes import DataType
from rocserve.core.device_references import DeviceReference, References, pack_references

PLACE = DeviceReference(b"handle", 0, 512, 0, DataType.FP32, (2,))


class Shared:
    shape = (2,)

    def pack_references(self, name: str, batching: bool) -> core.Tensor:
        assert not batching
        return pack_references(name, [PLACE])


class StandIn:
    """Stands in for DeviceTensors: the tensors that it opens are arrays, which may be copied."""

    name = "GPU-0"

    def __init__(self) -> None:
        self.done: list[str] = []

    def share(self, value: Any) -> Shared:
        self.done.append("share")
        return Shared()

    def wait(self) -> None:
        self.done.append("wait")

    def open(self, tensor: core.Tensor) -> Any:
        self.done.append("open")
        return np.full(tensor.shape, 7, np.float32)[:].view(Cloned)


class Cloned(np.ndarray):
    def clone(self) -> Any:
        return self.copy()


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Tensor:
    monkeypatch.setattr(tensors_module, "wrap_device_tensor", device_tensor)
    return device_tensor("x", np.ones(2, np.float32))


def device_tensor(name: str, value: Any) -> Tensor:
    made = Tensor(name, np.asarray(value))
    made._on_device = _Device(value)
    return made


class _Device:
    def __init__(self, value: Any) -> None:
        self._value = value

    def cpu(self) -> Any:
        return np.array(self._value)


def test_a_tensor_of_a_call_and_of_its_answer_stays_on_the_gpu(on_gpu: Tensor) -> None:
    answer = core.Tensor("y", DataType.FP32, (2,), References(pack_references("y", [PLACE]).data))
    calls = FakeCalls(other=lambda call, on_answer: on_answer(ModelResponse([answer]), True))
    tensors = StandIn()
    response = Caller(calls, tensors).run(ModelCall("other", (), (), accepts_references=True), [on_gpu]).result()
    [sent] = calls.calls
    assert (sent.device, sent.references, sent.accepts_references) == ("GPU-0", ("x",), True)
    assert sent.inputs[0].datatype is DataType.BYTES
    assert tensors.done == ["share", "wait", "open", "wait"]
    [y] = response.output_tensors()
    assert not y.is_cpu()
    np.testing.assert_array_equal(y._on_device.cpu(), [7, 7])


def test_a_call_of_a_model_elsewhere_is_made_again_by_the_host(on_gpu: Tensor) -> None:
    answer = core.Tensor("y", DataType.FP32, (1,), np.array([3], np.float32).tobytes())

    def other(call: ModelCall, on_answer: Any) -> None:
        on_answer(RESCHEDULED if call.references else ModelResponse([answer]), True)

    calls = FakeCalls(other=other)
    response = Caller(calls, StandIn()).run(ModelCall("other", (), (), accepts_references=True), [on_gpu]).result()
    first, again = calls.calls
    assert (first.references, again.references, again.device, again.accepts_references) == (("x",), (), "", False)
    np.testing.assert_array_equal(again.inputs[0].numpy(), [1, 1])
    assert response.output_tensors()[0].as_numpy().tolist() == [3]


class Full(StandIn):
    """Has no memory left."""

    def open(self, tensor: core.Tensor) -> Any:
        raise RuntimeError("HIP out of memory")


class Unreadable(_Device):
    def cpu(self) -> Any:
        raise RuntimeError("HIP error: no such page")


@pytest.mark.parametrize("again", [False, True])
def test_what_fails_on_the_gpu_behind_a_call_is_its_answer(on_gpu: Tensor, again: bool) -> None:
    """It is raised on the thread that reads answers, while the model waits."""
    answer = core.Tensor("y", DataType.FP32, (2,), References(pack_references("y", [PLACE]).data))
    calls = FakeCalls(other=lambda call, on_answer: on_answer(RESCHEDULED if again else ModelResponse([answer]), True))
    on_gpu._on_device = Unreadable(None)
    response = (
        Caller(calls, Full())
        .run(ModelCall("other", (), (), accepts_references=True), [on_gpu])
        .result(PATIENCE_SECONDS)
    )
    reason = "no such page" if again else "out of memory"
    assert response.error().message().startswith("the call of model 'other' failed: RuntimeError: HIP")
    assert reason in response.error().message()


def test_tensors_of_a_model_without_a_gpu_go_by_the_host() -> None:
    calls = FakeCalls(other=lambda call, on_answer: on_answer(ModelResponse([]), True))
    Caller(calls, None).run(ModelCall("other", (), ()), [Tensor("x", np.ones(2, np.float32))]).result()
    [sent] = calls.calls
    assert (sent.device, sent.references) == ("", ())
