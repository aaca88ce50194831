"""Tensors that stay on a GPU between two steps."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
from support.ensembles import FP32, Member, ask, ensemble, step

from rocserve.core.datatypes import DataType
from rocserve.core.device_references import DEVICE_PROPERTY, DeviceReference, pack_references, references_of
from rocserve.core.errors import StatusCode
from rocserve.core.model_config import InstanceGroup, InstanceKind, OutputConfig
from rocserve.core.requests import InputHead, RequestPlan
from rocserve.core.responses import InferResponse
from rocserve.core.tensors import Tensor, TensorHead


class OnGpu(Member):
    """Returns references if the request allows them."""

    def __init__(self, name: str, device: str = "GPU-0", **more) -> None:
        super().__init__(name, lambda values: values, **more)
        self.properties = {DEVICE_PROPERTY: device} if device else {}
        self.config = replace(self.config, instance_groups=(InstanceGroup("g", InstanceKind.GPU, 1, (0,)),))
        self.slots: list[weakref.ref] = []
        self.plans: list[RequestPlan] = []

    def _answer(self, request, plan, responder) -> None:
        self.plans.append(plan)
        rows = plan.batch_size
        outputs = []
        for name in plan.outputs:
            if name in plan.reference_outputs:
                places = [DeviceReference(self.name.encode(), 0, 512, 8 * row, FP32, (2,)) for row in range(rows)]
                outputs.append(pack_references(name, places))
            else:
                outputs.append(Tensor(name, FP32, (rows, 2), memoryview(bytes(8 * rows))))
        response = InferResponse.of(self.name, "1", request.id, outputs)
        response.slot = Slot()
        self.slots.append(weakref.ref(response.slot))
        responder.send(response)


class Slot:
    pass


def test_a_tensor_stays_on_the_gpu_until_its_reader_has_answered() -> None:
    a, b = OnGpu("a"), OnGpu("b", held=True)
    version = ensemble(a, b, steps=[step("a", "X", "T"), step("b", "T", "Y")])
    answer = ask(version, 1, 2, 3, 4)
    assert (a.requests[0].head.references, a.plans[0].reference_outputs) == (frozenset(), ("OUT",))
    [request] = b.requests
    assert request.head.references == {"IN"}
    assert request.head.inputs == (InputHead("IN", "FP32", (2, 2)),)
    [reference] = references_of(Tensor("IN", FP32, (2, 2), request.data[0]))[1:]
    assert reference == DeviceReference(b"a", 0, 512, 8, FP32, (2,))
    del request
    assert a.slots[0]() is not None
    b.requests.clear()
    b.finish()
    assert answer.value() == [0, 0, 0, 0]
    gc.collect()
    assert a.slots[0]() is None
    assert not a.plans[0].is_cacheable
    assert not b.plans[0].is_cacheable
    layout = b.plans[0].form.layout
    assert layout.inputs == (TensorHead("IN", DataType.BYTES, (2,)),)
    assert (layout.references, layout.reference_outputs) == ((TensorHead("IN", FP32, (2, 2)),), ())


@pytest.mark.parametrize(
    ("devices", "outputs"),
    [
        (("GPU-0", "GPU-1", "GPU-0"), ("Y", "Z")),
        (("GPU-0", "", "GPU-0"), ("Y", "Z")),
        (("", "GPU-0", "GPU-0"), ("Y", "Z")),
        (("GPU-0", "GPU-0", "GPU-0"), ("T", "Y", "Z")),
    ],
)
def test_a_tensor_comes_by_way_of_the_host(devices: tuple[str, ...], outputs: tuple[str, ...]) -> None:
    members = [OnGpu(name, device) for name, device in zip("abc", devices, strict=True)]
    steps = [step("a", "X", "T"), step("b", "T", "Y"), step("c", "T", "Z")]
    answer = ask(ensemble(*members, steps=steps, outputs=outputs), 1, 2)
    assert answer.error is None
    for member in members:
        assert (member.requests[0].head.references, member.requests[0].head.reference_outputs) == (
            frozenset(),
            frozenset(),
        )


def test_a_member_may_leave_the_gpu_before_its_step() -> None:
    a, b = OnGpu("a", held=True), OnGpu("b")
    answer = ask(ensemble(a, b, steps=[step("a", "X", "T"), step("b", "T", "Y")]), 1, 2)
    b.properties = {}
    a.finish()
    assert answer.error.code is StatusCode.UNAVAILABLE
    assert answer.error.text == "in ensemble 'e', model 'b' has just left the GPU on which tensor 'T' lies"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("b", {"instance_groups": (InstanceGroup("g", InstanceKind.GPU, 1, (0, 1)),)}),
        ("a", {"outputs": (OutputConfig("OUT", DataType.BYTES, (2,)),)}),
    ],
    ids=["its reader is on several GPUs", "it is text"],
)
def test_a_tensor_does_not_stay_on_a_gpu(name: str, change: dict[str, object]) -> None:
    members = {"a": OnGpu("a"), "b": OnGpu("b")}
    members[name].config = replace(members[name].config, **change)
    ask(ensemble(*members.values(), steps=[step("a", "X", "T"), step("b", "T", "Y")]), 1, 2)
    assert members["a"].requests[0].head.reference_outputs == frozenset()
