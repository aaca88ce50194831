"""TensorFlow graphs, over every binding."""

from __future__ import annotations

import numpy as np
import pytest
from support.graphdef import GraphDef, classified, classifier
from support.migraphx_programs import ProgramFactory, refusal

from rocserve.backends.migraphx.binding.interface import CompileFlags, Program, TensorflowOptions

pytestmark = pytest.mark.in_migraphx_process


def parse(factory: ProgramFactory, graph: bytes, options: TensorflowOptions) -> Program:
    return factory.binding.parse_tensorflow(factory.file(graph, "model.pb"), options)


def test_a_graph_gives_what_it_says(factory: ProgramFactory) -> None:
    program = parse(factory, classifier(), TensorflowOptions(batch_size=2))
    program.compile("ref", CompileFlags())
    image = np.random.default_rng(1).standard_normal((2, 8, 8, 3)).astype(np.float32)
    assert program.parameters["image"].shape == (2, 3, 8, 8)  # NHWC comes as NCHW
    (scores,) = program.run({"image": np.ascontiguousarray(image.transpose(0, 3, 1, 2))})
    np.testing.assert_allclose(scores, classified(image), atol=1e-5)


def test_shapes_are_as_the_program_takes_them(factory: ProgramFactory) -> None:
    program = parse(factory, classifier(), TensorflowOptions(input_shapes={"image": (3, 3, 8, 8)}))
    assert program.parameters["image"].shape == (3, 3, 8, 8)
    assert program.outputs[0].shape == (3, 5)


def test_outputs_are_chosen_by_name(factory: ProgramFactory) -> None:
    options = TensorflowOptions(output_names=("scores", "flat"))
    assert [output.shape for output in parse(factory, classifier(), options).outputs] == [(1, 5), (1, 64)]


def test_a_channels_first_graph(factory: ProgramFactory) -> None:
    graph = GraphDef()
    graph.node("Relu", "y", graph.placeholder("x", [2, 3, 4, 4]))
    program = parse(factory, graph.serialized(), TensorflowOptions(nhwc=False))
    program.compile("ref", CompileFlags())
    x = np.random.default_rng(1).standard_normal((2, 3, 4, 4)).astype(np.float32)
    np.testing.assert_array_equal(program.run({"x": x})[0], np.maximum(x, 0))


def test_what_is_refused(factory: ProgramFactory) -> None:
    graph = classifier()
    message = refusal(lambda: parse(factory, graph, TensorflowOptions(input_shapes={"picture": (1, 3, 8, 8)})))
    assert message == "a shape is given for input 'picture', but the model's inputs are 'image'"
    message = refusal(lambda: parse(factory, graph, TensorflowOptions(batch_size=0)))
    assert message == "the batch size must be 1 or more, not 0"
    assert "Failed reading" in refusal(lambda: parse(factory, b"garbage, no graph", TensorflowOptions()))


def test_an_operation_that_migraphx_lacks_fails_when_it_runs(factory: ProgramFactory) -> None:
    graph = GraphDef()
    graph.node("MyFancyOp", "y", graph.placeholder("x", [2, 4]))
    program = parse(factory, graph.serialized(), TensorflowOptions())
    program.compile("ref", CompileFlags())
    assert "MyFancyOp" in refusal(lambda: program.run({"x": np.ones((2, 4), np.float32)}))
