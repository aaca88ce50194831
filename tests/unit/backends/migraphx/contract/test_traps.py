"""Calls that would abort the process or give wrong numbers are refused before MIGraphX is called, and MIGraphX's own
errors keep their texts, over every binding."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from support import migraphx_models as models
from support.migraphx_programs import ProgramFactory, refusal

from rocserve.backends.migraphx.binding import Array, DimensionRange, Program

pytestmark = pytest.mark.in_migraphx_process

RIGHT = {"x": np.ones((2, 16), np.float32)}


@pytest.fixture
def parsed(factory: ProgramFactory) -> Program:
    return factory.parse(models.mlp(), 2)


@pytest.fixture
def compiled(factory: ProgramFactory) -> Program:
    return factory.compiled(models.mlp(), 2)


@pytest.fixture
def varying(factory: ProgramFactory) -> Program:
    return factory.compiled(models.mlp(), x=(DimensionRange(1, 8), 16))


def test_a_program_is_compiled_once(compiled: Program) -> None:
    message = refusal(lambda: compiled.compile("ref"))
    assert message == "the program is compiled already: it cannot be compiled again; parse the model again"
    assert compiled.run(RIGHT)[0].shape == (2, 10)


def test_a_program_is_quantised_before_it_is_compiled(compiled: Program) -> None:
    expected = "the program is compiled already: it cannot be quantised; parse the model again"
    assert refusal(lambda: compiled.quantize("fp16")) == expected
    assert refusal(lambda: compiled.quantize("bf16")) == expected
    assert refusal(lambda: compiled.quantize("int8", "ref", [RIGHT])) == expected
    assert refusal(lambda: compiled.quantize("fp8", "ref", [RIGHT])) == expected


def test_a_program_from_a_file_is_known_to_be_compiled(factory: ProgramFactory, compiled: Program) -> None:
    compiled.save(factory.folder / "compiled.mxr")
    loaded = factory.binding.load(factory.folder / "compiled.mxr")
    assert "cannot be compiled again" in refusal(lambda: loaded.compile("ref"))
    np.testing.assert_array_equal(compiled.run(RIGHT)[0], loaded.run(RIGHT)[0])


def test_a_program_is_compiled_before_it_runs(parsed: Program) -> None:
    assert refusal(lambda: parsed.run(RIGHT)) == "the program must be compiled before it runs"


@pytest.mark.parametrize("content", [b"\x08\x08", b"\x08\x08\x3a\x00"], ids=["no graph", "empty graph"])
def test_an_empty_program_is_not_compiled(factory: ProgramFactory, content: bytes) -> None:
    program = factory.parse(content)
    expected = "the program is empty: the model has no outputs"
    assert refusal(lambda: program.compile("ref")) == expected
    assert refusal(lambda: program.quantize("fp16")) == expected


def test_paths_of_any_letters(factory: ProgramFactory, compiled: Program) -> None:
    folder = factory.folder / "Modèle „x“ 模型"
    folder.mkdir()
    compiled.save(folder / "a b.mxr")
    assert factory.binding.load(folder / "a b.mxr").run(RIGHT)[0].shape == (2, 10)
    missing = factory.folder / "none" / "a.mxr"
    assert refusal(lambda: compiled.save(missing)) == (
        f"'{missing}' cannot be written: there is no folder '{missing.parent}'"
    )


def test_int8_and_fp8_want_calibration(parsed: Program) -> None:
    expected = "needs calibration data: give it at least one sample of the model's inputs"
    assert refusal(lambda: parsed.quantize("int8", "ref", [])) == f"int8 {expected}"
    assert refusal(lambda: parsed.quantize("fp8", "ref", [])) == f"fp8 {expected}"


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        ({"x": np.ones((3, 16), np.float32)}, "input 'x' must have the shape [2, 16]; it has [3, 16]"),
        ({"X": np.ones((2, 16), np.float32)}, "unexpected input 'X': the program's inputs are 'x'"),
        ({"x": np.ones((2, 16))}, "input 'x' must be of dtype float32; it is of float64"),
        ({}, "input 'x' is missing: the program's inputs are 'x'"),
    ],
    ids=["shape", "name", "dtype", "missing"],
)
def test_a_wrong_calibration_sample(parsed: Program, kind: str, sample: Mapping[str, Array], expected: str) -> None:
    assert refusal(lambda: parsed.quantize(kind, "ref", [RIGHT, sample])) == f"calibration sample 1: {expected}"


def test_calibration_arrays_that_nobody_else_holds(factory: ProgramFactory) -> None:
    """Arguments share the arrays' memory, and MIGraphX does not keep the arrays alive."""
    model = models.mini_resnet()
    inputs = models.random_inputs(model, 2)

    def quantised(keep: bool) -> Array:
        program = factory.parse(model, 2)
        held = [models.random_inputs(model, 2, seed) for seed in range(4)] if keep else None
        program.quantize("int8", "ref", held or [models.random_inputs(model, 2, seed) for seed in range(4)])
        program.compile("ref")
        return program.run(inputs)[0]

    np.testing.assert_array_equal(quantised(keep=True), quantised(keep=False))


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({}, "input 'x' is missing: the program's inputs are 'x'"),
        ({**RIGHT, "y": RIGHT["x"]}, "unexpected input 'y': the program's inputs are 'x'"),
        ({"x": np.ones((3, 16), np.float32)}, "input 'x' must have the shape [2, 16]; it has [3, 16]"),
        ({"x": np.ones((2, 4, 4), np.float32)}, "input 'x' must have the shape [2, 16]; it has [2, 4, 4]"),
        ({"x": np.ones((2, 16), np.float16)}, "input 'x' must be of dtype float32; it is of float16"),
        ({"x": np.ones((2, 16), ">f4")}, "input 'x' must be of dtype float32; it is of >f4"),
        ({"x": np.ones((16, 2), np.float32).T}, "input 'x' must be C-contiguous (numpy.ascontiguousarray makes it so)"),
        ({"x": np.ones((2, 32), np.float32)[:, ::2]}, "input 'x' must be C-contiguous (numpy.asco"),
        ({"x": [[1.0] * 16] * 2}, "input 'x' must be a numpy array, not list"),
    ],
    ids=["missing", "extra", "shape", "rank", "dtype", "byte order", "turned", "strided", "list"],
)
def test_inputs_are_exactly_right(compiled: Program, inputs: Mapping[str, Array], expected: str) -> None:
    assert refusal(lambda: compiled.run(inputs)).startswith(expected)
    assert refusal(lambda: compiled.run_into(inputs, [None])).startswith(expected)
    assert compiled.run(RIGHT)[0].shape == (2, 10)


@pytest.mark.parametrize("rows", [0, 9, 100])
def test_a_dimension_keeps_within_its_range(varying: Program, rows: int) -> None:
    message = refusal(lambda: varying.run({"x": np.ones((rows, 16), np.float32)}))
    assert message == f"input 'x' must have the shape [1..8, 16]; it has [{rows}, 16]"


def test_what_varies_together_is_said_by_migraphx_where_it_does_not(factory: ProgramFactory) -> None:
    shape = (DimensionRange(1, 8), 4)
    program = factory.compiled(models.two_in_two_out(), left=shape, right=shape)
    inputs = {"left": np.ones((2, 4), np.float32), "right": np.ones((3, 4), np.float32)}
    assert "{2, 4} and {3, 4} mismatch" in refusal(lambda: program.run(inputs))


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ([], "the program has 1 outputs, but 0 arrays are given for them"),
        ([np.zeros((2, 9), np.float32)], "the array for output 0 must have the shape [2, 10]; it has [2, 9]"),
        ([np.zeros((2, 10))], "the array for output 0 must be of dtype float32; it is of float64"),
        ([np.zeros((10, 2), np.float32).T], "the array for output 0 must be C-contiguous"),
        ([np.frombuffer(bytes(80), np.float32).reshape(2, 10)], "the array for output 0 cannot be written"),
    ],
    ids=["count", "shape", "dtype", "turned", "read-only"],
)
def test_arrays_for_outputs_are_exactly_right(compiled: Program, arrays: list[Array], expected: str) -> None:
    assert refusal(lambda: compiled.run_into(RIGHT, arrays)).startswith(expected)


def test_shapes_for_inputs_that_the_model_lacks(factory: ProgramFactory) -> None:
    message = refusal(lambda: factory.parse(models.two_in_two_out(), x=(2, 4)))
    assert message == "a shape is given for input 'x', but the model's inputs are 'left', 'right'"
    message = refusal(lambda: factory.parse(models.mlp(), y=(DimensionRange(1, 2), 4)))
    assert message == "a shape is given for input 'y', but the model's inputs are 'x'"


@pytest.mark.parametrize(
    ("shape", "text"), [((0, 16), "[0, 16]"), ((DimensionRange(0, 8), 16), "[0..8, 16]"), ((-1, 16), "[-1, 16]")]
)
def test_shapes_have_no_empty_dimensions(factory: ProgramFactory, shape: tuple[int, ...], text: str) -> None:
    message = refusal(lambda: factory.parse(models.mlp(), x=shape))
    assert message.startswith(f"input 'x' cannot have the shape {text}: dimensions are 1 or more")


@pytest.fixture
def wants_buffers(factory: ProgramFactory) -> Program:
    """A program compiled without offload_copy has parameters for its outputs; this stand-in declares them, and adds its
    inputs."""
    value = helper.make_tensor_value_info
    name = "main:#output_0"
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", name], ["y"])],
        "network",
        [value("x", TensorProto.FLOAT, [2]), value(name, TensorProto.FLOAT, [2])],
        [value("y", TensorProto.FLOAT, [2])],
    )
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    program = factory.compiled(model.SerializeToString())
    assert list(program.parameters) == ["x"] and list(program.output_buffers) == [name]
    return program


def test_a_program_that_wants_its_memory_on_the_gpu_does_not_run_without(
    wants_buffers: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rocserve.backends.migraphx.binding.loaded_hip", lambda: None)
    message = refusal(lambda: wants_buffers.run({"x": np.ones(2, np.float32)}))
    assert message.startswith(
        "the program was compiled with offload_copy off: it expects inputs and outputs in GPU memory"
    )


def test_a_program_file_of_another_migraphx_is_loaded_with_a_warning(factory: ProgramFactory) -> None:
    content = saved(factory).read_bytes()
    version = factory.binding.migraphx_version.encode()
    assert content.count(version) == 1
    program = factory.binding.load(factory.file(content.replace(version, b"1" * len(version)), "older.mxr"))
    assert program.run({"x": np.ones((1, 16), np.float32)})[0].shape == (1, 10)
    messages = factory.binding.take_messages()
    assert any(
        message.startswith("[WARNING]: MXR File was created using MIGraphX version: 11") for message in messages
    ), messages
    assert factory.binding.take_messages() == []


@pytest.mark.parametrize("target", ["gpu", "cpu", "none", "../../x"])
def test_a_target_that_is_not_there(factory: ProgramFactory, target: str) -> None:
    message = refusal(lambda: factory.binding.check_target(target))
    assert f"Dynamic loading or symbol lookup failed with libmigraphx_{target}.so: cannot open shared object" in message
    program = factory.parse(models.mlp())

    assert refusal(lambda: program.compile(target)) == message
    assert not program.is_compiled
    program.compile("ref")


def test_a_target_that_is_there(factory: ProgramFactory) -> None:
    factory.binding.check_target("ref")


def saved(factory: ProgramFactory) -> Path:
    path = factory.folder / "program.mxr"
    factory.compiled(models.mlp()).save(path)
    return path
