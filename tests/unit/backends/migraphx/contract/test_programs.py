"""Programs of ONNX models and TensorFlow graphs, over every binding on the real MIGraphX: what they declare and
compute."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from support import migraphx_models as models
from support.graphdef import GraphDef, classified, classifier
from support.migraphx_programs import ProgramFactory, onnx_runtime, refusal

from rocserve.backends.migraphx.binding import DimensionRange, MigraphxError, Program, ProgramTensor

pytestmark = pytest.mark.in_migraphx_process

UP_TO_8 = DimensionRange(1, 8)


def test_a_program_tells_its_inputs_and_outputs(factory: ProgramFactory) -> None:
    program = factory.compiled(models.two_in_two_out(), 3)
    assert program.is_compiled
    assert program.parameters == {
        "left": ProgramTensor("left", "float", (3, 4)),
        "right": ProgramTensor("right", "float", (3, 4)),
    }
    assert program.outputs == (ProgramTensor("", "float", (3, 4)), ProgramTensor("", "float", (3, 6)))
    assert program.output_buffers == {}


@pytest.mark.parametrize("network", [models.mini_resnet, models.mlp, models.two_in_two_out, models.reshaped_to_free])
def test_answers_are_those_of_onnx_runtime(factory: ProgramFactory, network: Callable[[], bytes]) -> None:
    model = network()
    inputs = models.random_inputs(model, 1)
    for ours, theirs in zip(factory.compiled(model).run(inputs), onnx_runtime(model, inputs), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_a_symbolic_batch_is_one_unless_said(factory: ProgramFactory) -> None:
    assert factory.parse(models.mlp()).parameters["x"].shape == (1, 16)
    assert factory.parse(models.mlp(), 5).parameters["x"].shape == (5, 16)
    assert factory.parse(models.mlp(), x=(4, 16)).parameters["x"].shape == (4, 16)


def test_a_shape_is_set_over_a_batch_in_the_file(factory: ProgramFactory) -> None:
    program = factory.compiled(models.reshaped_to_free(1), x=(3, 2, 3))
    assert program.outputs[0].shape == (3, 6)
    x = np.arange(18, dtype=np.float32).reshape(3, 2, 3)
    np.testing.assert_array_equal(program.run({"x": x})[0], (x * x).reshape(3, 6))


def test_a_batch_that_varies_gives_the_bits_of_a_fixed_one(factory: ProgramFactory) -> None:
    model = models.mlp()
    varying = factory.compiled(model, x=(UP_TO_8, 16))
    assert varying.parameters["x"].shape == (UP_TO_8, 16)
    assert varying.outputs[0].shape == (UP_TO_8, 10)
    for rows in (1, 3, 8):
        inputs = models.random_inputs(model, rows, seed=rows)
        (fixed,) = factory.compiled(model, rows).run(inputs)
        np.testing.assert_array_equal(varying.run(inputs)[0], fixed)


def test_fixed_and_varying_shapes_go_together(factory: ProgramFactory) -> None:
    shape = (UP_TO_8, 4)
    program = factory.compiled(models.two_in_two_out(), left=shape, right=shape)
    assert program.parameters["right"].shape == shape
    both = factory.parse(models.two_in_two_out(), left=(2, 4), right=(DimensionRange(2, 2), 4))
    assert both.parameters["left"].shape == both.parameters["right"].shape == (2, 4)


def test_padding_changes_no_row(factory: ProgramFactory) -> None:
    model = models.mini_resnet()
    one, four = factory.compiled(model), factory.compiled(model, 4)
    (row,) = models.random_inputs(model, 1).values()
    (alone,) = one.run({"image": row})
    for filler in (0, 7, -1e30, np.nan):
        padded = np.full((4, *row.shape[1:]), filler, np.float32)
        padded[:1] = row
        np.testing.assert_array_equal(four.run({"image": padded})[0][:1], alone)


def test_outputs_are_the_callers_own(factory: ProgramFactory) -> None:
    program = factory.compiled(models.identity(shape=(2, 4)))
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    (first,) = program.run({"x": x})
    x += 100
    (second,) = program.run({"x": x})
    np.testing.assert_array_equal(first, np.arange(8).reshape(2, 4))
    np.testing.assert_array_equal(second, x)
    assert first.flags.owndata and first.flags.writeable


def test_arrays_may_come_from_anywhere_each_time(factory: ProgramFactory) -> None:
    program = factory.compiled(models.mlp(), x=(UP_TO_8, 16))
    expected = program.run({"x": np.full((2, 16), 0.5, np.float32)})[0]
    for size in (2, 5, 2, 8):
        program.run({"x": np.ones((size, 16), np.float32)})
        gc.collect()
        np.testing.assert_array_equal(program.run({"x": np.full((2, 16), 0.5, np.float32)})[0], expected)
    read_only = np.full((2, 16), 0.5, np.float32)
    read_only.flags.writeable = False
    np.testing.assert_array_equal(program.run({"x": read_only})[0], expected)


def test_runs_into_arrays_of_the_callers(factory: ProgramFactory) -> None:
    model = models.two_in_two_out()
    program = factory.compiled(model, 2)
    inputs = models.random_inputs(model, 2)
    difference, product = program.run(inputs)
    into = [np.zeros((2, 4), np.float32), np.zeros((2, 6), np.float32)]
    program.run_into(inputs, into)
    np.testing.assert_array_equal(into[0], difference)
    np.testing.assert_array_equal(into[1], product)
    into[1][:] = 0
    program.run_into(inputs, [None, into[1]])
    np.testing.assert_array_equal(into[1], product)


def test_arrays_of_fewer_rows_get_the_first_ones(factory: ProgramFactory) -> None:
    model = models.two_in_two_out()
    program = factory.compiled(model, 4)
    inputs = models.random_inputs(model, 4)
    difference, product = program.run(inputs)
    into = [np.zeros((3, 4), np.float32), np.zeros((1, 6), np.float32)]
    program.run_into(inputs, into)
    np.testing.assert_array_equal(into[0], difference[:3])
    np.testing.assert_array_equal(into[1], product[:1])
    with pytest.raises(MigraphxError, match=r"^the array for output 1 must have the shape \[4, 6\]; it has \[5, 6\]"):
        program.run_into(inputs, [None, np.zeros((5, 6), np.float32)])
    with pytest.raises(MigraphxError, match=r"^the array for output 1 must have the shape \[3, 6\]; it has \[3, 5\]"):
        program.run_into(inputs, [None, np.zeros((3, 5), np.float32)])


def test_runs_a_batch_that_varies_into_arrays_of_the_callers(factory: ProgramFactory) -> None:
    program = factory.compiled(models.mlp(), x=(UP_TO_8, 16))
    x = np.ones((3, 16), np.float32)
    into = np.zeros((3, 10), np.float32)
    program.run_into({"x": x}, [into])
    np.testing.assert_array_equal(into, program.run({"x": x})[0])
    with pytest.raises(MigraphxError, match=r"^output 0 has the shape \[3, 10\], but the array given for it \[4, 10\]"):
        program.run_into({"x": x}, [np.zeros((4, 10), np.float32)])


DATATYPES = {
    TensorProto.BOOL: "bool",
    TensorProto.FLOAT16: "float16",
    TensorProto.FLOAT: "float32",
    TensorProto.DOUBLE: "float64",
    TensorProto.UINT8: "uint8",
    TensorProto.INT8: "int8",
    TensorProto.UINT16: "uint16",
    TensorProto.INT16: "int16",
    TensorProto.INT32: "int32",
    TensorProto.INT64: "int64",
    TensorProto.UINT32: "uint32",
    TensorProto.UINT64: "uint64",
}


@pytest.mark.parametrize("element_type", list(DATATYPES), ids=list(DATATYPES.values()))
def test_every_datatype_goes_in_and_out(factory: ProgramFactory, element_type: int) -> None:
    program = factory.compiled(models.identity(element_type, (2, 4)))
    x = np.array([[0, 1, 1, 0], [1, 2, 3, 100]]).astype(DATATYPES[element_type])
    (y,) = program.run({"x": x})
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y, x)


@pytest.mark.parametrize(
    ("element_type", "name", "bits"),
    [(TensorProto.BFLOAT16, "bf16", np.uint16), (TensorProto.FLOAT8E4M3FNUZ, "fp8e4m3fnuz", np.uint8)],
)
def test_datatypes_that_numpy_lacks_go_as_their_bits(
    factory: ProgramFactory, element_type: int, name: str, bits: type[np.generic]
) -> None:
    program = factory.compiled(models.identity(element_type, (1, 4)))
    assert program.parameters["x"].datatype == program.outputs[0].datatype == name
    x = np.array([[0, 1, 2, 60]]).astype(bits)
    if factory.binding.name == "module":
        with pytest.raises(MigraphxError, match=f"^input 'x' is {name}, which MIGraphX's Python module does not take"):
            program.run({"x": x})
        return
    np.testing.assert_array_equal(program.run({"x": x})[0], x)
    with pytest.raises(
        MigraphxError, match=rf"must be of dtype {np.dtype(bits)}, the bits of {name}; it is of float32"
    ):
        program.run({"x": x.astype(np.float32)})


def test_single_values_have_no_dimensions(factory: ProgramFactory) -> None:
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "factor"], ["y"]), helper.make_node("Add", ["factor", "factor"], ["twice"])],
        "network",
        [value("x", TensorProto.FLOAT, [2, 3]), value("factor", TensorProto.FLOAT, [])],
        [value("y", TensorProto.FLOAT, [2, 3]), value("twice", TensorProto.FLOAT, [])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    program = factory.compiled(model.SerializeToString())
    assert program.parameters["factor"].shape == ()
    y, twice = program.run({"x": np.ones((2, 3), np.float32), "factor": np.array(3, np.float32)})
    np.testing.assert_array_equal(y, np.full((2, 3), 3))
    assert twice.shape == () and twice == 6


def test_an_output_that_lies_turned_round_comes_straight(factory: ProgramFactory) -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    (y,) = factory.compiled(models.without_batch()).run({"x": x})
    assert y.flags.c_contiguous
    np.testing.assert_array_equal(y, x.T)


def test_a_program_prints_itself_and_nothing_else(factory: ProgramFactory, capfd: pytest.CaptureFixture[str]) -> None:
    program = factory.parse(models.mlp())
    assert "= softmax[" in program.text()
    compiled = factory.compiled(models.mlp())
    assert "= ref::softmax[" in compiled.text()
    assert "x = @param:x -> float_type, {1, 16}" in compiled.text()
    assert capfd.readouterr() == ("", "")


def test_threads_on_one_program_wait_for_each_other(factory: ProgramFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU concurrent runs would share the program's scratch memory; the reference target does not need this."""
    model = models.mlp()
    program = factory.compiled(model, 2)
    inputs = [models.random_inputs(model, 2, seed) for seed in range(4)]
    expected = [program.run(one)[0] for one in inputs]
    wrong: list[int] = []
    under_way, most = 0, 0
    unwatched = program._run

    def run(*arguments: Any) -> Any:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        time.sleep(0.001)  # A call that does not wait would run now.
        views = unwatched(*arguments)
        under_way -= 1
        return views

    monkeypatch.setattr(program, "_run", run)

    def work(number: int) -> None:
        for _ in range(20):
            if not np.array_equal(program.run(inputs[number])[0], expected[number]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert wrong == []


def parse(factory: ProgramFactory, graph: bytes, **options: Any) -> Program:
    return factory.binding.parse_tensorflow(factory.file(graph, "model.pb"), **options)


def test_a_graph_gives_what_it_says(factory: ProgramFactory) -> None:
    program = parse(factory, classifier(), batch_size=2)
    program.compile("ref")
    image = np.random.default_rng(1).standard_normal((2, 8, 8, 3)).astype(np.float32)
    assert program.parameters["image"].shape == (2, 3, 8, 8)  # NHWC becomes NCHW.
    (scores,) = program.run({"image": np.ascontiguousarray(image.transpose(0, 3, 1, 2))})
    np.testing.assert_allclose(scores, classified(image), atol=1e-5)


def test_shapes_are_as_the_program_takes_them(factory: ProgramFactory) -> None:
    program = parse(factory, classifier(), shapes={"image": (3, 3, 8, 8)})
    assert program.parameters["image"].shape == (3, 3, 8, 8)
    assert program.outputs[0].shape == (3, 5)


def test_outputs_are_chosen_by_name(factory: ProgramFactory) -> None:
    program = parse(factory, classifier(), output_names=("scores", "flat"))
    assert [output.shape for output in program.outputs] == [(1, 5), (1, 64)]


def test_what_is_refused(factory: ProgramFactory) -> None:
    graph = classifier()
    message = refusal(lambda: parse(factory, graph, shapes={"picture": (1, 3, 8, 8)}))
    assert message == "a shape is given for input 'picture', but the model's inputs are 'image'"
    message = refusal(lambda: parse(factory, graph, batch_size=0))
    assert message == "dimensions without a shape must be 1 or more, not 0"
    assert "Failed reading" in refusal(lambda: parse(factory, b"garbage, no graph"))


def test_an_operation_that_migraphx_lacks_fails_when_it_runs(factory: ProgramFactory) -> None:
    graph = GraphDef()
    graph.node("MyFancyOp", "y", graph.placeholder("x", [2, 4]))
    program = parse(factory, graph.serialized())
    program.compile("ref")
    assert "MyFancyOp" in refusal(lambda: program.run({"x": np.ones((2, 4), np.float32)}))
