"""Users' own compiled programs (.mxr) and TensorFlow graphs on the real engine, target ref; the graphs are compared
with numpy."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from support import migraphx_models
from support.graphdef import GraphDef, brightened, brightening, classified, classifier
from support.host_hip import host_hip
from support.migraphx_engine import Engine, answers, given, wanted
from support.migraphx_serving import compiled, expected

from rocserve.backends.migraphx.installation import ROOT_VARIABLE
from rocserve.backends.migraphx.model import MigraphxModel
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.requests import TensorSpec

pytestmark = [pytest.mark.in_migraphx_process, pytest.mark.long, pytest.mark.usefixtures("jobs_here")]

FP32 = DataType.FP32
NETWORK = migraphx_models.two_in_two_out()
BUFFER = "main:#output_0"
"""The parameter that marks a GPU's program; on target ref there is none."""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """`two_in_two_out` at a batch of 2."""
    return compiled(Path(os.environ[ROOT_VARIABLE]), NETWORK, tmp_path_factory.mktemp("program"), batch=2)


@pytest.fixture
def first_engine(tmp_path: Path) -> Engine:
    """An engine with an empty cache."""
    return Engine(tmp_path, tmp_path / "cache")


def serve(engine: Engine, content: bytes, max_batch_size: int = 0, **more: Any) -> MigraphxModel:
    return engine.complete(content, max_batch_size, filename="model.mxr", backend="migraphx", **more)


class TestBatches:
    def test_any_batch_runs_at_the_files_own_size(self, engine: Engine, program: bytes) -> None:
        model = serve(engine, program, 8)
        assert model.properties["batch_sizes"] == "2"
        assert "precision" not in model.properties
        assert model.signature.supports_batching
        for rows in (1, 2, 5):
            inputs = migraphx_models.random_inputs(NETWORK, rows)
            found = answers(model, inputs)
            for values, right in zip(found.values(), expected(NETWORK, inputs).values(), strict=True):
                np.testing.assert_allclose(values, right, rtol=1e-4, atol=1e-5)

    def test_without_batches_the_shapes_are_the_programs(self, engine: Engine, program: bytes) -> None:
        model = serve(engine, program)
        assert not model.signature.supports_batching
        assert model.signature.inputs == (TensorSpec("left", FP32, (2, 4)), TensorSpec("right", FP32, (2, 4)))
        with pytest.raises(ServeError, match=r"must have the shape \[2, 4\] that the model is compiled for, got"):
            answers(model, migraphx_models.random_inputs(NETWORK, 1))

    def test_one_for_a_range_of_batches_says_how_many_rows_it_takes(self, engine: Engine) -> None:
        model = serve(engine, compiled(Path(os.environ[ROOT_VARIABLE]), NETWORK, engine.folder, (1, 5)))
        assert (model.signature.supports_batching, model.signature.max_batch_size) == (True, 5)

    def test_one_that_has_no_batch_cannot_batch(self, engine: Engine) -> None:
        turning = migraphx_models.without_batch()
        program = compiled(Path(os.environ[ROOT_VARIABLE]), turning, engine.folder)
        with pytest.raises(ServeError, match=r"output 'output_0' .* its first dimension is not the batch"):
            serve(engine, program, 2)


class TestNames:
    def test_outputs_without_names_are_numbered(self, engine: Engine, program: bytes) -> None:
        assert [spec.name for spec in serve(engine, program, 2).signature.outputs] == ["output_0", "output_1"]

    def test_the_configurations_names_are_taken_in_their_order(self, engine: Engine, program: bytes) -> None:
        model = serve(
            engine,
            program,
            2,
            inputs=(given("right", 4), given("left", 4)),
            outputs=(wanted("first", 4), wanted("second", 6)),
        )
        assert [spec.name for spec in model.signature.inputs] == ["right", "left"]
        assert model.signature.outputs == (TensorSpec("first", FP32, (-1, 4)), TensorSpec("second", FP32, (-1, 6)))

    def test_the_onnx_file_beside_it_knows_its_names(self, engine: Engine, program: bytes) -> None:
        engine.write("model.onnx", NETWORK)
        model = serve(engine, program, 2)
        assert [spec.name for spec in model.signature.outputs] == ["difference", "product"]
        assert "note" not in model.properties

    def test_some_names_only_are_refused(self, engine: Engine, program: bytes) -> None:
        with pytest.raises(ServeError) as refused:
            serve(engine, program, 2, outputs=(wanted("only", 4),))
        assert refused.value.text == (
            "model 'model' has 1 outputs in its configuration, but model.mxr has 2 without names;"
            " name all of them, in the program's order"
        )


class TestWithoutOffloadCopy:
    @pytest.mark.usefixtures("jobs_in_children")
    def test_its_tensors_go_through_the_gpus_memory(
        self, first_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The GPU's memory is the host's here, also in the child that tries the file, and begins with zeros. The
        program only has a GPU program's parameter, and is treated as one."""
        value = helper.make_tensor_value_info
        rows = [2, 3]
        network = helper.make_graph(
            [helper.make_node("Add", ["x", BUFFER], ["y"])],
            "network",
            [value("x", TensorProto.FLOAT, rows), value(BUFFER, TensorProto.FLOAT, rows)],
            [value("y", TensorProto.FLOAT, rows)],
        )
        onnx_model = helper.make_model(network, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        content = compiled(Path(os.environ[ROOT_VARIABLE]), onnx_model.SerializeToString(), first_engine.folder)
        library = host_hip(tmp_path)
        hip = ctypes.CDLL(str(library))
        monkeypatch.setenv("LD_PRELOAD", str(library))
        monkeypatch.setattr("rocserve.backends.migraphx.binding.loaded_hip", lambda: hip)
        monkeypatch.setattr("rocserve.backends.migraphx.engine.check_mxr", lambda *checked: None)
        model = serve(first_engine, content, 8)
        assert any("trying model.mxr of model 'model'" in text for text in first_engine.reports)
        assert model.signature.inputs == (TensorSpec("x", FP32, (-1, 3)),)
        for count in (1, 2, 5):
            x = np.arange(count * 3, dtype=np.float32).reshape(count, 3)
            np.testing.assert_array_equal(answers(model, {"x": x})["output_0"], x)


class TestFilesThatCannotBeUsed:
    def test_it_is_compiled_anew_where_its_onnx_file_lies_beside(self, engine: Engine, program: bytes) -> None:
        engine.write("model.onnx", NETWORK)
        model = serve(engine, other_version(program), 2)
        assert model.properties["note"].startswith("model.onnx is compiled instead of model.mxr: ")
        assert "was compiled by MIGraphX 2.13.0" in model.properties["note"]
        assert model.properties["batch_sizes"] == "1, 2"
        inputs = migraphx_models.random_inputs(NETWORK, 2)
        for name, values in expected(NETWORK, inputs).items():
            np.testing.assert_allclose(answers(model, inputs)[name], values, rtol=1e-4, atol=1e-5)

    def test_it_keeps_the_configurations_names_then(self, engine: Engine, program: bytes) -> None:
        engine.write("model.onnx", NETWORK)
        outputs = (wanted("first", 4), wanted("second", 6))
        model = serve(engine, other_version(program), 1, inputs=(given("left", 4), given("right", 4)), outputs=outputs)
        assert [spec.name for spec in model.signature.outputs] == ["first", "second"]

    def test_a_good_one_is_tried_once(self, first_engine: Engine, program: bytes) -> None:
        serve(first_engine, program, 2)
        assert any("trying model.mxr of model 'model'" in text for text in first_engine.reports)
        first_engine.reports.clear()
        serve(first_engine, program, 2)
        assert first_engine.reports == [""]

    @pytest.mark.usefixtures("jobs_in_children")
    def test_one_that_crashes_is_tried_once_and_its_successor_again(self, first_engine: Engine, program: bytes) -> None:
        with pytest.raises(ServeError, match="MIGraphX ended by signal"):
            serve(first_engine, crashing(program), 2)
        first_engine.reports.clear()
        with pytest.raises(ServeError) as refused:
            serve(first_engine, crashing(program), 2)
        assert refused.value.text.startswith(
            "model.mxr has crashed MIGraphX before, and is not tried again until it changes: "
        )
        assert "MIGraphX ended by signal" in refused.value.text
        assert first_engine.reports == []
        serve(first_engine, program, 2)


def other_version(program: bytes) -> bytes:
    """The program with another MIGraphX version in its header."""
    assert program.count(b"2.14.0") == 1
    return program.replace(b"2.14.0", b"2.13.0")


def crashing(program: bytes) -> bytes:
    """The program with an output that none of its instructions makes, which crashes MIGraphX."""
    assert program.endswith(b"@9")
    return program[:-1] + b"?"


def serve_graph(engine: Engine, content: bytes, max_batch_size: int, **more: Any) -> MigraphxModel:
    return engine.complete(content, max_batch_size, filename="model.graphdef", backend="tensorflow", **more)


def random(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(7).uniform(-1, 1, shape).astype(np.float32)


def test_images_come_and_go_in_the_clients_layout(engine: Engine) -> None:
    model = serve_graph(engine, classifier(), 4)
    assert model.signature.inputs == (TensorSpec("image", FP32, (-1, 8, 8, 3)),)
    assert model.signature.outputs == (TensorSpec("scores", FP32, (-1, 5)),)
    assert model.signature.supports_batching
    for rows in (1, 3, 4, 6):
        images = random(rows, 8, 8, 3)
        np.testing.assert_allclose(answers(model, {"image": images})["scores"], classified(images), atol=1e-5)


def test_an_output_that_is_an_image_has_the_clients_layout_too(engine: Engine) -> None:
    model = serve_graph(engine, brightening(), 2)
    picture, bias = random(3, 4, 6, 2), random(3, 2)
    found = answers(model, {"picture": picture, "bias": bias})
    brighter, doubled = brightened(picture, bias)
    assert model.signature.outputs[0] == TensorSpec("brighter", FP32, (-1, 4, 6, 2))
    np.testing.assert_allclose(found["brighter"], brighter, atol=1e-6)
    np.testing.assert_allclose(found["doubled"], doubled, atol=1e-6)


def test_the_configuration_says_which_nodes_are_the_outputs(engine: Engine) -> None:
    graph = GraphDef()
    graph.node("Relu", "second", graph.node("Tanh", "first", graph.placeholder("x", [-1, 3])))
    model = serve_graph(
        engine, graph.serialized(), 1, inputs=(given("x", 3),), outputs=(wanted("second", 3), wanted("first", 3))
    )
    values = random(1, 3)
    found = answers(model, {"x": values})
    assert list(found) == ["second", "first"]
    np.testing.assert_allclose(found["first"], np.tanh(values), atol=1e-6)
    np.testing.assert_allclose(found["second"], np.maximum(np.tanh(values), 0), atol=1e-6)


def test_without_batches_the_shape_is_the_graphs(engine: Engine) -> None:
    model = serve_graph(engine, classifier(batch=2), 0)
    assert not model.signature.supports_batching
    assert model.signature.inputs == (TensorSpec("image", FP32, (2, 8, 8, 3)),)
    images = random(2, 8, 8, 3)
    np.testing.assert_allclose(answers(model, {"image": images})["scores"], classified(images), atol=1e-5)
