"""The inputs and outputs of programs, in clients' terms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from rocserve.backends.migraphx.binding.interface import DimensionRange, ProgramTensor
from rocserve.backends.migraphx.serving.programs import ServedTensor, batch_range, program_layout
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.requests import TensorSpec

FP32 = DataType.FP32


@dataclass(slots=True)
class Tensors:
    """As much of a program as a layout is made from."""

    inputs: Sequence[ProgramTensor]
    outputs: Sequence[ProgramTensor]

    @property
    def parameters(self) -> dict[str, ProgramTensor]:
        return {tensor.name: tensor for tensor in self.inputs}


def program(inputs: Sequence[ProgramTensor], *outputs: ProgramTensor) -> Any:
    return Tensors(inputs, outputs)


def tensor(name: str, *shape: int | DimensionRange, datatype: str = "float") -> ProgramTensor:
    return ProgramTensor(name, datatype, shape)


def test_inputs_stand_in_the_clients_order_and_the_rest_by_name() -> None:
    found = program([tensor("a", 1), tensor("b", 1), tensor("d", 1), tensor("c", 1)], tensor("", 1))
    layout = program_layout(found, ["b", "unused"], ["y"])
    assert [entry.name for entry in layout.inputs] == ["b", "a", "c", "d"]


def test_a_signature_has_any_batch_where_the_model_batches() -> None:
    layout = program_layout(program([tensor("x", 4, 3)], tensor("", 4, 2, datatype="int64")), ["x"], ["y"])
    signature = layout.signature(batching=True)
    assert signature.inputs == (TensorSpec("x", FP32, (-1, 3)),)
    assert signature.outputs == (TensorSpec("y", DataType.INT64, (-1, 2)),)
    assert signature.supports_batching
    assert layout.signature(batching=False).inputs == (TensorSpec("x", FP32, (4, 3)),)


def test_images_of_an_nhwc_graph_are_nchw_to_the_program() -> None:
    found = program([tensor("image", 1, 3, 8, 6), tensor("bias", 1, 3)], tensor("", 1, 4, 8, 6))
    layout = program_layout(found, ["image", "bias"], ["y"], nhwc=True)
    assert layout.inputs[0] == ServedTensor("image", FP32, (1, 8, 6, 3), channels_last=True)
    assert layout.inputs[0].program_shape == (1, 3, 8, 6)
    assert layout.inputs[1] == ServedTensor("bias", FP32, (1, 3))
    assert layout.outputs[0].shape == (1, 8, 6, 4)


@pytest.mark.parametrize("datatype", ["fp8e4m3fn", "fp8e5m2", "tuple"])
def test_a_type_without_a_name_in_kserve_is_refused(datatype: str) -> None:
    with pytest.raises(ServeError) as refused:
        program_layout(program([tensor("x", 1, datatype=datatype)], tensor("", 1)), ["x"], ["y"])
    assert refused.value.text.startswith(
        f"input 'x' has MIGraphX's type {datatype}, which has no datatype in the KServe protocol; those that have are"
    )


def test_outputs_must_be_as_many_as_their_names() -> None:
    with pytest.raises(ServeError, match="the program has 1 outputs, expected 2: y, z"):
        program_layout(program([tensor("x", 1)], tensor("", 1)), ["x"], ["y", "z"])


def test_a_first_dimension_that_is_no_batch_is_refused() -> None:
    layout = program_layout(program([tensor("x", 4, 3)], tensor("", 3)), ["x"], ["y"])
    with pytest.raises(ServeError) as refused:
        layout.check_batch(4, "m")
    assert refused.value.text == (
        "output 'y' of model 'm' has shape [3] when compiled for a batch of 4: its first dimension is not the batch, so"
        " the model cannot be batched; set max_batch_size: 0"
    )


def test_of_outputs_that_vary_with_values_no_dimension_is_known() -> None:
    varying = DimensionRange(0, 4)
    layout = program_layout(program([tensor("x", 4, 3)], tensor("", 4, varying), tensor("", 4)), ["x"], ["y", "z"])
    assert [(entry.shape, entry.depends_on_values) for entry in layout.outputs] == [((4, -1), True), ((4,), False)]
    with pytest.raises(ServeError, match=r"^the shape of output 'y' of model 'm' depends on"):
        layout.check_batch(4, "m")


def test_outputs_that_vary_with_a_batch_are_told_at_its_least() -> None:
    varying = DimensionRange(1, 4)
    layout = program_layout(program([tensor("x", varying, 3)], tensor("", varying, 2)), ["x"], ["y"])
    assert layout.outputs[0].shape == (1, 2)


class TestBatchRanges:
    def test_of_fixed_shapes_there_is_none(self) -> None:
        assert batch_range([tensor("x", 4, 3), tensor("y")]) is None

    def test_it_is_what_all_inputs_have(self) -> None:
        one_to_eight = DimensionRange(1, 8)
        assert batch_range([tensor("x", one_to_eight, 3), tensor("y", one_to_eight)]) == one_to_eight

    def test_another_dimension_may_not_vary(self) -> None:
        with pytest.raises(ServeError, match="input 'x' of the program varies in a dimension beside the first"):
            batch_range([tensor("x", 1, DimensionRange(1, 8))])

    def test_inputs_may_not_vary_differently(self) -> None:
        with pytest.raises(ServeError, match="the inputs of the program vary differently in their first dimension"):
            batch_range([tensor("x", DimensionRange(1, 8)), tensor("y", 4)])
