"""Batches cut, padded, staged and sliced, and the clients' names and datatypes of inputs and outputs, with a program in
numpy; test_engine.py has real ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from rocserve.backends.migraphx.binding import Array, DimensionRange, ProgramTensor
from rocserve.backends.migraphx.layout import ProgramLayout, program_layout
from rocserve.backends.migraphx.program_runner import LoadedProgram, ProgramRunner
from rocserve.backends.migraphx.tensors import batch_range
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.padding import PaddedDimension, Padding
from rocserve.core.requests import TensorSpec

FP32 = DataType.FP32


class DoublingProgram:
    """`twice` = 2 x, `same` = x, for any shape; records its inputs."""

    def __init__(self, shape: tuple[int | DimensionRange, ...]) -> None:
        tensor = ProgramTensor("x", "float", shape)
        self.is_compiled = True
        self.parameters = {"x": tensor}
        self.outputs = (tensor, tensor)
        self.output_buffers = {}
        self.given: list[Array] = []
        self.addresses: list[int] = []
        self.outputs_written: list[tuple[bool, ...]] = []

    def run(self, inputs: Mapping[str, Array]) -> Sequence[Array]:
        self._take(inputs["x"])
        return [inputs["x"] * 2, inputs["x"].copy()]

    def run_into(self, inputs: Mapping[str, Array], outputs: Sequence[Array | None]) -> None:
        self._take(inputs["x"])
        self.outputs_written.append(tuple(output is not None for output in outputs))
        for output, values in zip(outputs, (inputs["x"] * 2, inputs["x"]), strict=True):
            if output is not None:
                assert output.flags.c_contiguous
                assert output.shape[1:] == values.shape[1:]
                output[...] = values[: len(output)] if output.ndim else values

    def _take(self, array: Array) -> None:
        assert array.flags.c_contiguous
        self.given.append(array.copy())
        self.addresses.append(array.ctypes.data)


def layout(*shape: int, nhwc: bool = False) -> ProgramLayout:
    x, *outputs = (TensorSpec(name, FP32, shape) for name in ("x", "twice", "same"))
    return ProgramLayout((x,), tuple(outputs), nhwc)


def one_size(program: DoublingProgram, layout: ProgramLayout, pad_with_first_row: bool = True) -> LoadedProgram:
    size = layout.inputs[0].shape[0]
    return LoadedProgram(program, layout, DimensionRange(size, size), pad_with_first_row)


def sized(*sizes: int, pad_with_first_row: bool = True) -> tuple[ProgramRunner, dict[int, DoublingProgram]]:
    programs = {size: DoublingProgram((size, 3)) for size in sizes}
    first, *others = (one_size(programs[size], layout(size, 3), pad_with_first_row) for size in sizes)
    runner = ProgramRunner("m", first)
    for program in others:
        runner.add(program)
    return runner, programs


def rows(count: int, first: int = 1) -> Array:
    """Rows that all differ: first, first, first; first + 1, ..."""
    return np.repeat(np.arange(first, first + count, dtype=np.float32)[:, None], 3, axis=1)


class TestBatchesOfCompiledSizes:
    def test_a_batch_of_a_programs_size_is_given_to_it_where_it_lies(self) -> None:
        runner, programs = sized(1, 2, 4)
        batch = rows(4)
        result = runner.run({"x": batch}, ("twice",))
        assert programs[4].addresses == [batch.ctypes.data]
        np.testing.assert_array_equal(result["twice"], batch * 2)
        assert not programs[1].given
        assert not programs[2].given

    def test_one_between_two_sizes_is_padded_up_and_sliced_down(self) -> None:
        runner, programs = sized(1, 2, 4)
        result = runner.run({"x": rows(3)}, ("twice", "same"))
        np.testing.assert_array_equal(programs[4].given[0], [[1] * 3, [2] * 3, [3] * 3, [1] * 3])
        np.testing.assert_array_equal(result["twice"], rows(3) * 2)
        np.testing.assert_array_equal(result["same"], rows(3))

    def test_without_padding_by_the_first_row_it_is_zeros_whatever_was_there_before(self) -> None:
        runner, programs = sized(4, pad_with_first_row=False)
        runner.run({"x": rows(3, first=5)}, ("twice",))
        runner.run({"x": rows(1)}, ("twice",))
        np.testing.assert_array_equal(programs[4].given[0][3], [0, 0, 0])
        np.testing.assert_array_equal(programs[4].given[1], [[1] * 3, [0] * 3, [0] * 3, [0] * 3])

    def test_one_above_all_sizes_runs_in_pieces(self) -> None:
        runner, programs = sized(1, 2, 4)
        result = runner.run({"x": rows(11)}, ("twice",))
        assert [len(given) for given in programs[4].given] == [4, 4, 4]
        np.testing.assert_array_equal(programs[4].given[2][:, 0], [9, 10, 11, 9])
        np.testing.assert_array_equal(result["twice"], rows(11) * 2)

    def test_with_the_first_program_only_any_batch_is_answered(self) -> None:
        runner, programs = sized(1)
        np.testing.assert_array_equal(runner.run({"x": rows(5)}, ("same",))["same"], rows(5))
        assert len(programs[1].given) == 5

    def test_a_program_that_is_added_serves_from_the_next_batch_on(self) -> None:
        runner, programs = sized(2)
        runner.run({"x": rows(1)}, ("same",))
        smaller = DoublingProgram((1, 3))
        runner.add(one_size(smaller, layout(1, 3)))
        assert runner.batch_sizes == "1, 2"
        runner.run({"x": rows(1)}, ("same",))
        assert (len(programs[2].given), len(smaller.given)) == (1, 1)

    def test_the_staging_memory_is_used_again(self) -> None:
        runner, programs = sized(4)
        for _ in range(3):
            runner.run({"x": rows(3)}, ("same",))
        assert len(set(programs[4].addresses)) == 1

    def test_a_batch_that_is_not_contiguous_is_staged(self) -> None:
        runner, programs = sized(4)
        wide = np.repeat(rows(4), 2, axis=1)
        result = runner.run({"x": wide[:, ::2]}, ("twice",))
        np.testing.assert_array_equal(result["twice"], rows(4) * 2)
        assert programs[4].addresses[0] != wide.ctypes.data

    def test_only_the_outputs_that_are_wanted_are_written(self) -> None:
        runner, programs = sized(4)
        assert list(runner.run({"x": rows(4)}, ("same",))) == ["same"]
        assert programs[4].outputs_written == [(False, True)]

    def test_outputs_stay_as_they_are_while_the_next_batch_runs(self) -> None:
        runner, _ = sized(4)
        batch = rows(4)
        first = runner.run({"x": batch}, ("same",))["same"]
        batch += 10
        second = runner.run({"x": batch}, ("same",))["same"]
        np.testing.assert_array_equal(first, rows(4))
        np.testing.assert_array_equal(second, rows(4, first=11))
        assert not np.shares_memory(first, batch)

    @pytest.mark.parametrize("count", [3, 4, 7])
    def test_outputs_go_where_there_is_room_for_them(self, count: int) -> None:
        runner, _ = sized(1, 4)
        room = {"twice": np.zeros((count, 3), np.float32)}
        result = runner.run({"x": rows(count)}, ("twice", "same"), room)
        assert result["twice"] is room["twice"]
        np.testing.assert_array_equal(room["twice"], rows(count) * 2)
        np.testing.assert_array_equal(result["same"], rows(count))

    @pytest.mark.parametrize("place", [np.zeros((2, 3), np.float32), np.zeros((4, 3), np.float64)])
    def test_room_for_another_shape_or_datatype_is_left_alone(self, place: Array) -> None:
        runner, _ = sized(4)
        result = runner.run({"x": rows(4)}, ("twice",), {"twice": place})
        np.testing.assert_array_equal(result["twice"], rows(4) * 2)
        assert not place.any()

    def test_warming_up_runs_each_program_on_zeros(self) -> None:
        runner, programs = sized(1, 4)
        runner.warm_up()
        np.testing.assert_array_equal(programs[1].given, np.zeros((1, 1, 3)))
        np.testing.assert_array_equal(programs[4].given, np.zeros((1, 4, 3)))

    @pytest.mark.parametrize(
        ("batch", "got"),
        [(np.zeros((2, 4), np.float32), "[2, 4]"), (np.zeros(3, np.float32), "[3]"), (rows(0), "[0, 3]")],
    )
    def test_rows_of_another_shape_are_refused(self, batch: Array, got: str) -> None:
        runner, _ = sized(4)
        with pytest.raises(ServeError) as refused:
            runner.run({"x": batch}, ("same",))
        assert refused.value.text == (
            "input 'x' of model 'm' must have the shape [rows, 3] that the model is compiled for, with at least one"
            f" row, got {got}"
        )

    def test_another_datatype_is_refused(self) -> None:
        runner, _ = sized(4)
        with pytest.raises(ServeError, match=r"input 'x' of model 'm' must be FP32, got an array of int32"):
            runner.run({"x": rows(4).astype(np.int32)}, ("same",))

    def test_a_missing_input_is_refused(self) -> None:
        runner, _ = sized(4)
        with pytest.raises(ServeError, match="input 'x' of model 'm' is missing; a compiled program takes all of its"):
            runner.run({}, ("same",))

    def test_inputs_of_different_rows_are_refused(self) -> None:
        shape = (2, 3)
        inputs = (TensorSpec("a", FP32, shape), TensorSpec("b", FP32, shape))
        runner = ProgramRunner("m", one_size(DoublingProgram(shape), ProgramLayout(inputs, ())))
        with pytest.raises(ServeError, match=r"input 'b' of model 'm' must have the shape \[2, 3\] .*, got \[1, 3\]"):
            runner.run({"a": rows(2), "b": rows(1)}, ())


class TestImagesWithChannelsLast:
    def test_they_are_turned_for_the_program_and_back(self) -> None:
        program = DoublingProgram((2, 3, 4, 5))
        runner = ProgramRunner("m", one_size(program, layout(2, 4, 5, 3, nhwc=True)))
        images = np.arange(120, dtype=np.float32).reshape(2, 4, 5, 3)
        result = runner.run({"x": images}, ("twice",))
        np.testing.assert_array_equal(program.given[0], images.transpose(0, 3, 1, 2))
        np.testing.assert_array_equal(result["twice"], images * 2)

    def test_they_are_turned_where_there_is_room_as_well(self) -> None:
        program = DoublingProgram((2, 3, 3, 3))
        runner = ProgramRunner("m", one_size(program, layout(2, 3, 3, 3, nhwc=True)))
        images = np.arange(54, dtype=np.float32).reshape(2, 3, 3, 3)
        room = {"twice": np.zeros((2, 3, 3, 3), np.float32)}
        np.testing.assert_array_equal(runner.run({"x": images}, ("twice",), room)["twice"], images * 2)

    def test_they_are_padded_as_others_are(self) -> None:
        program = DoublingProgram((2, 3, 4, 5))
        runner = ProgramRunner("m", one_size(program, layout(2, 4, 5, 3, nhwc=True)))
        image = np.arange(60, dtype=np.float32).reshape(1, 4, 5, 3)
        result = runner.run({"x": image}, ("same",))
        np.testing.assert_array_equal(program.given[0], np.concatenate([image, image]).transpose(0, 3, 1, 2))
        np.testing.assert_array_equal(result["same"], image)


class TestModelsWithoutBatchDimension:
    def test_the_very_shape_is_run_where_it_lies_and_the_output_goes_where_there_is_room(self) -> None:
        program = DoublingProgram((4, 3))
        whole, room = rows(4), {"twice": np.zeros((4, 3), np.float32)}
        result = ProgramRunner("m", LoadedProgram(program, layout(4, 3), None)).run({"x": whole}, ("twice",), room)
        assert result["twice"] is room["twice"]
        np.testing.assert_array_equal(room["twice"], whole * 2)
        assert program.addresses == [whole.ctypes.data]

    def test_a_scalar_is_a_shape_too(self) -> None:
        runner = ProgramRunner("m", LoadedProgram(DoublingProgram(()), layout(), None))
        result = runner.run({"x": np.array(3, np.float32)}, ("twice",))
        assert result["twice"].shape == ()
        assert result["twice"] == 6

    def test_other_shapes_are_refused(self) -> None:
        program = DoublingProgram((4, 3))
        runner = ProgramRunner("m", LoadedProgram(program, layout(4, 3), None))
        with pytest.raises(ServeError) as refused:
            runner.run({"x": rows(3)}, ("same",))
        assert refused.value.text == (
            "input 'x' of model 'm' must have the shape [4, 3] that the model is compiled for, got [3, 3];"
            " configure other shapes with max_batch_size, dims, or parameter 'input_shapes'"
        )
        assert not program.given


class TestDynamicPrograms:
    def runner(self, least: int = 1) -> tuple[ProgramRunner, DoublingProgram]:
        rows = DimensionRange(least, 8)
        program = DoublingProgram((rows, 3))
        return ProgramRunner("m", LoadedProgram(program, layout(least, 3), rows)), program

    def test_a_batch_within_the_range_runs_as_it_is_and_the_output_goes_where_there_is_room(self) -> None:
        runner, program = self.runner()
        batch, room = rows(5), {"twice": np.zeros((5, 3), np.float32)}
        assert runner.run({"x": batch}, ("twice",), room)["twice"] is room["twice"]
        np.testing.assert_array_equal(room["twice"], batch * 2)
        assert program.addresses == [batch.ctypes.data]
        assert runner.batch_sizes == "1 to 8"

    @pytest.mark.parametrize(("count", "given"), [(2, [3]), (9, [8, 3])])
    def test_one_outside_of_it_is_padded_or_runs_in_pieces(self, count: int, given: list[int]) -> None:
        runner, program = self.runner(least=3)
        np.testing.assert_array_equal(runner.run({"x": rows(count)}, ("same",))["same"], rows(count))
        assert [len(batch) for batch in program.given] == given

    def test_a_batch_that_is_not_contiguous_is_staged(self) -> None:
        runner, program = self.runner()
        wide = np.repeat(rows(4), 2, axis=1)
        np.testing.assert_array_equal(runner.run({"x": wide[:, ::2]}, ("twice",))["twice"], rows(4) * 2)
        assert program.given[0].shape == (4, 3)

    def test_warming_up_runs_the_ends_of_the_range(self) -> None:
        runner, program = self.runner()
        runner.warm_up()
        assert [given.shape for given in program.given] == [(1, 3), (8, 3)]


@dataclass(slots=True)
class Tensors:
    """As much of a program as its layout needs."""

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
    assert layout.inputs == (TensorSpec("image", FP32, (1, 8, 6, 3)), TensorSpec("bias", FP32, (1, 3)))
    assert layout.program_shape(layout.inputs[0]) == (1, 3, 8, 6)
    assert layout.outputs[0].shape == (1, 8, 6, 4)


@pytest.mark.parametrize("datatype", ["fp8e4m3fn", "fp8e5m2", "tuple"])
def test_a_type_without_a_name_in_kserve_is_refused(datatype: str) -> None:
    with pytest.raises(ServeError) as refused:
        program_layout(program([tensor("x", 1, datatype=datatype)], tensor("", 1)), ["x"], ["y"])
    assert refused.value.text.startswith(
        f"input 'x' has MIGraphX's type {datatype}, which the KServe protocol does not have; supported types are"
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
    assert [entry.shape for entry in layout.outputs] == [(4, -1), (4,)]
    assert layout.varies
    with pytest.raises(ServeError, match=r"^the shape of output 'y' of model 'm' depends on"):
        layout.check_batch(4, "m")


def test_outputs_that_vary_with_a_batch_have_the_shape_of_the_smallest() -> None:
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
        with pytest.raises(ServeError, match="input 'x' of the program varies in a dimension other than the first"):
            batch_range([tensor("x", 1, DimensionRange(1, 8))])

    def test_inputs_may_not_vary_differently(self) -> None:
        with pytest.raises(ServeError, match="the inputs of the program vary differently in their first dimension"):
            batch_range([tensor("x", DimensionRange(1, 8)), tensor("y", 4)])


class TestPaddedSizes:
    """A program doubles x [batch, length], whose length is padded with 9."""

    PADDING = Padding((PaddedDimension("length", (2, 4, 8), {"x": (1,)}, {"twice": (1,), "same": (1,)}),), {"x": 9.0})

    def runner(self, *sizes: tuple[int, int], exact: str = "") -> tuple[ProgramRunner, dict[str, DoublingProgram]]:
        programs = {f"{rows}x{length}": DoublingProgram((rows, length)) for rows, length in sizes}
        loaded = [
            LoadedProgram(
                programs[f"{rows}x{length}"],
                layout(rows, length),
                DimensionRange(rows, rows),
                sizes=(length,),
                padding=self.PADDING,
            )
            for rows, length in sizes
        ]
        runner = ProgramRunner("m", loaded[0], exact)
        for program in loaded[1:]:
            runner.add(program)
        return runner, programs

    @staticmethod
    def runs(programs: dict[str, DoublingProgram]) -> dict[str, int]:
        return {name: len(program.given) for name, program in programs.items() if program.given}

    @pytest.mark.parametrize(
        ("batch", "expected"),
        [
            ((1, 2), {"1x2": 1}),
            ((2, 2), {"1x2": 2}),
            ((2, 4), {"2x4": 1}),
            ((1, 4), {"2x4": 1}),
            ((3, 4), {"2x4": 2}),
            ((1, 8), {"1x8": 1}),
            ((3, 8), {"1x8": 3}),
            ((4, 2), {"1x2": 4}),
        ],
    )
    def test_a_batch_runs_where_the_fewest_elements_are_computed(
        self, batch: tuple[int, int], expected: dict[str, int]
    ) -> None:
        # Two rows of 2 are 4 elements in two runs, or 8 in one.
        runner, programs = self.runner((1, 8), (1, 2), (2, 4))
        x = np.arange(batch[0] * batch[1], dtype=np.float32).reshape(batch)
        found = runner.run({"x": x}, ("twice", "same"))
        assert self.runs(programs) == expected
        np.testing.assert_array_equal(found["twice"], x * 2)
        np.testing.assert_array_equal(found["same"], x)

    def test_added_elements_have_the_padding_s_value_and_never_other_clients_data(self) -> None:
        runner, programs = self.runner((2, 8))
        runner.run({"x": np.full((2, 8), 5, np.float32)[:, ::-1]}, ("same",))
        runner.run({"x": np.full((1, 4), 3, np.float32)}, ("same",))
        assert programs["2x8"].given[-1].tolist() == [[3.0] * 4 + [9.0] * 4] * 2

    def test_a_batch_that_must_not_be_cut_takes_larger_sizes(self) -> None:
        runner, programs = self.runner((1, 8), (1, 2), (2, 8), exact="rows depend on each other")
        runner.run({"x": np.ones((2, 2), np.float32)}, ("same",))
        assert self.runs(programs) == {"2x8": 1}
        with pytest.raises(ServeError, match="got 3 rows"):
            runner.run({"x": np.ones((3, 2), np.float32)}, ("same",))
        assert runner.blank({"x": np.ones((3, 2), np.float32)}, ("same",))["same"].shape == (3, 2)

    def test_a_batch_beyond_the_largest_size(self) -> None:
        runner, _ = self.runner((1, 8))
        with pytest.raises(ServeError, match="dimension 'length' of input 'x' is 9, expected 1 to 8, the largest"):
            runner.run({"x": np.ones((1, 9), np.float32)}, ("same",))

    def test_a_program_whose_outputs_have_other_sizes_is_refused(self) -> None:
        runner, _ = self.runner((1, 8))
        other = ProgramLayout(layout(1, 4).inputs, layout(1, 3).outputs)
        program = LoadedProgram(DoublingProgram((1, 4)), other, DimensionRange(1, 1), sizes=(4,), padding=self.PADDING)
        with pytest.raises(ServeError, match=r"output 'twice' of model 'm' has the shape \[1, 3\] at length 4"):
            runner.add(program)
        assert runner.batch_sizes == "1"
