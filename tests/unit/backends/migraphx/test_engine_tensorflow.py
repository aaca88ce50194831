"""TensorFlow graphs on the real engine, target ref, against numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.graphdef import GraphDef, brightened, brightening, classified, classifier
from support.migraphx_engine import Engine, answers, given, wanted

from rocserve.backends.migraphx.serving.model import MigraphxModel
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.requests import TensorSpec

pytestmark = [pytest.mark.in_migraphx_process, pytest.mark.long]

FP32 = DataType.FP32


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path, tmp_path / "cache")


def serve(engine: Engine, content: bytes, max_batch_size: int, **more: Any) -> MigraphxModel:
    return engine.complete(content, max_batch_size, filename="model.graphdef", backend="tensorflow", **more)


def random(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(7).uniform(-1, 1, shape).astype(np.float32)


def test_images_come_and_go_in_the_clients_layout(engine: Engine) -> None:
    model = serve(engine, classifier(), 4)
    assert model.signature.inputs == (TensorSpec("image", FP32, (-1, 8, 8, 3)),)
    assert model.signature.outputs == (TensorSpec("scores", FP32, (-1, 5)),)
    assert model.signature.supports_batching
    for rows in (1, 3, 4, 6):
        images = random(rows, 8, 8, 3)
        np.testing.assert_allclose(answers(model, {"image": images})["scores"], classified(images), atol=1e-5)


def test_an_output_that_is_an_image_has_the_clients_layout_too(engine: Engine) -> None:
    model = serve(engine, brightening(), 2)
    picture, bias = random(3, 4, 6, 2), random(3, 2)
    found = answers(model, {"picture": picture, "bias": bias})
    brighter, doubled = brightened(picture, bias)
    assert model.signature.outputs[0] == TensorSpec("brighter", FP32, (-1, 4, 6, 2))
    np.testing.assert_allclose(found["brighter"], brighter, atol=1e-6)
    np.testing.assert_allclose(found["doubled"], doubled, atol=1e-6)


def test_the_configuration_says_which_nodes_are_the_outputs(engine: Engine) -> None:
    graph = GraphDef()
    graph.node("Relu", "second", graph.node("Tanh", "first", graph.placeholder("x", [-1, 3])))
    model = serve(
        engine, graph.serialized(), 1, inputs=(given("x", 3),), outputs=(wanted("second", 3), wanted("first", 3))
    )
    values = random(1, 3)
    found = answers(model, {"x": values})
    assert list(found) == ["second", "first"]
    np.testing.assert_allclose(found["first"], np.tanh(values), atol=1e-6)
    np.testing.assert_allclose(found["second"], np.maximum(np.tanh(values), 0), atol=1e-6)


def test_without_batches_the_shape_is_the_graphs(engine: Engine) -> None:
    model = serve(engine, classifier(batch=2), 0)
    assert not model.signature.supports_batching
    assert model.signature.inputs == (TensorSpec("image", FP32, (2, 8, 8, 3)),)
    images = random(2, 8, 8, 3)
    np.testing.assert_allclose(answers(model, {"image": images})["scores"], classified(images), atol=1e-5)


def test_an_operator_that_migraphx_lacks_is_found_before_anything_is_served(engine: Engine) -> None:
    """MIGraphX reads such a graph, and fails when it runs."""
    graph = GraphDef()
    graph.node("NoSuchOperator", "y", graph.placeholder("x", [-1, 3]))
    with pytest.raises(ServeError, match="NoSuchOperator"):
        serve(engine, graph.serialized(), 1)


@pytest.mark.parametrize("content", [b"", b"no graph at all", classifier()[:500]])
def test_a_damaged_graph_has_a_reason(engine: Engine, content: bytes) -> None:
    with pytest.raises(ServeError, match=r"model\.graphdef"):
        serve(engine, content, 1)
