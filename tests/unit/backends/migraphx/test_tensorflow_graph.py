"""What is read from a TensorFlow graph without TensorFlow, and that MIGraphX reads the same."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support import graphdef
from support.graphdef import GraphDef

from rocserve.backends.base import ModelSource
from rocserve.backends.migraphx.compiling.graph import GraphTensor
from rocserve.backends.migraphx.compiling.plan import ProgramPlan, plan_programs
from rocserve.backends.migraphx.compiling.recipe import ProgramEnvironment, SourceKind
from rocserve.backends.migraphx.compiling.tensorflow_graph import read_tensorflow_graph
from rocserve.backends.migraphx.options import Target, compile_options, serving_options
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import InstanceKind, ModelConfig, OutputConfig


def _write(folder: Path, content: bytes) -> Path:
    path = folder / "model.pb"
    path.write_bytes(content)
    return path


def _refusal(path: Path) -> str:
    with pytest.raises(ServeError) as error:
        read_tensorflow_graph(path)
    assert error.value.code is StatusCode.INVALID_ARGUMENT
    return error.value.text


def test_a_classifier(tmp_path: Path) -> None:
    graph = read_tensorflow_graph(_write(tmp_path, graphdef.classifier()))
    assert graph.inputs == (GraphTensor("image", DataType.FP32, ("", 8, 8, 3)),)
    assert graph.outputs == (GraphTensor("scores", None, None),)


def test_inputs_and_outputs_keep_the_files_order(tmp_path: Path) -> None:
    graph = read_tensorflow_graph(_write(tmp_path, graphdef.brightening(2)))
    assert graph.inputs == (
        GraphTensor("picture", DataType.FP32, (2, 4, 6, 2)),
        GraphTensor("bias", DataType.FP32, (2, 2)),
    )
    assert graph.outputs == (GraphTensor("brighter", None, None), GraphTensor("doubled", None, None))


def test_shapes_and_types_of_placeholders(tmp_path: Path) -> None:
    graph = GraphDef()
    graph.placeholder("scalar", [], np.int64)
    graph.placeholder("unknown", None, np.float16)
    graph.placeholder("zero", [0, 2], np.int32)
    graph.node("Identity", "out", "scalar")
    read = read_tensorflow_graph(_write(tmp_path, graph.serialized()))
    assert [(tensor.datatype, tensor.dims) for tensor in read.inputs] == [
        (DataType.INT64, ()),
        (DataType.FP16, None),
        (DataType.INT32, ("", 2)),
    ]


def test_what_is_read_in_any_way_is_no_output(tmp_path: Path) -> None:
    graph = GraphDef()
    graph.placeholder("x", [2])
    graph.constant("lonely", np.ones(2, np.float32))
    graph.node("Split", "parts", "x")
    graph.node("NoOp", "init")
    graph.node("Identity", "before", "x")
    graph.node("Identity", "after", "parts:1", "^before")
    assert read_tensorflow_graph(_write(tmp_path, graph.serialized())).outputs == (GraphTensor("after", None, None),)


def _with(operator: str) -> bytes:
    graph = GraphDef()
    graph.placeholder("x", [2])
    graph.node(operator, "v", "x")
    return graph.serialized()


def _channels_first() -> bytes:
    graph = GraphDef()
    graph.placeholder("x", [-1, 3, 8, 8])
    graph.node("Relu", "y", "x", data_format="NCHW")
    return graph.serialized()


def _of_type(number: int) -> bytes:
    graph = GraphDef()
    graph.placeholder("x", [2], number)
    graph.node("Identity", "y", "x")
    return graph.serialized()


def _twice() -> bytes:
    graph = GraphDef()
    graph.placeholder("x", [2])
    graph.node("Identity", "y", "x")
    graph.node("Identity", "y", "x")
    return graph.serialized()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: b"", "TensorFlow graph model.pb is empty; copy it again"),
        (lambda: b"\x08\x01\x12\x03abc", "is a SavedModel, not a GraphDef: convert its folder"),
        (lambda: b"this is no graph", "is damaged or not a GraphDef (16 bytes: "),
        (lambda: graphdef.classifier()[:-100], "is damaged or not a GraphDef ("),
        (lambda: GraphDef().serialized(), "is not a GraphDef, or is damaged: it has no outputs"),
        (_twice, "has two nodes of one name"),
        (lambda: _with("VarHandleOp"), "is not frozen: it has variables (VarHandleOp); freeze the graph"),
        (_channels_first, "has node 'y' with data_format NCHW, which MIGraphX would read as NHWC; export the graph in"),
        (lambda: _of_type(4), "has placeholder 'x' of type uint8, which MIGraphX does not take; it takes FP32, FP64,"),
        (lambda: _of_type(graphdef.STRING), "has placeholder 'x' of type string, which MIGraphX"),
        (lambda: _of_type(99), "has placeholder 'x' of type number 99, which MIGraphX"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, make: Callable[[], bytes], text: str) -> None:
    assert text in _refusal(_write(tmp_path, make()))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "model.pb cannot be read: No such file or directory" in _refusal(tmp_path / "model.pb")
    path = _write(tmp_path, b"")
    os.truncate(path, 1 << 31)
    assert "has more than the format's 2 GB" in _refusal(path)


def test_damaged_files_give_nothing_but_our_error(tmp_path: Path) -> None:
    chance = random.Random(7)
    whole = graphdef.brightening()
    refused = 0
    for _ in range(500):
        damaged = bytearray(whole)
        for _ in range(chance.randrange(1, 6)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        if chance.random() < 0.3:
            del damaged[chance.randrange(len(damaged)) :]
        try:
            read_tensorflow_graph(_write(tmp_path, bytes(damaged)))
        except ServeError as error:
            assert error.code is StatusCode.INVALID_ARGUMENT
            refused += 1
    assert refused > 200


def _plan(folder: Path, content: bytes, **config: object) -> ProgramPlan:
    complete = ModelConfig("m", **{"backend": "tensorflow", **config})  # type: ignore[arg-type]
    source = ModelSource("m", 1, folder, folder, _write(folder, content), complete, InstanceKind.AUTO, None, 1)
    options = compile_options(complete, InstanceKind.AUTO, {Target.REF})
    return plan_programs(source, options, serving_options(complete), ProgramEnvironment("2.14.0"))


class TestPlan:
    def test_images_are_nhwc_to_clients_and_nchw_to_the_program(self, tmp_path: Path) -> None:
        plan = _plan(tmp_path, graphdef.brightening(), max_batch_size=2)
        assert [recipe.input_shapes for recipe in plan.recipes] == [
            {"picture": (size, 2, 4, 6), "bias": (size, 2)} for size in (1, 2)
        ]
        assert [tensor.shape for tensor in plan.inputs] == [(-1, 4, 6, 2), (-1, 2)]
        assert [tensor.name for tensor in plan.outputs] == ["brighter", "doubled"]
        assert plan.recipes[0].source.kind is SourceKind.TENSORFLOW
        assert plan.recipes[0].output_names == ("brighter", "doubled")

    def test_what_migraphx_reads_wrongly_is_refused_where_an_output_depends_on_it(self, tmp_path: Path) -> None:
        graph = GraphDef()
        graph.placeholder("x", [-1, 2])
        graph.node("LessEqual", "below", "x", "x")
        graph.node("Assert", "checked", "below")
        graph.node("Cast", "mask", "below:0")
        graph.node("Identity", "y", "x", "^checked", "^below")
        content = graph.serialized()
        with pytest.raises(ServeError, match="node 'below' of the TensorFlow graph has operator LessEqual, which MIG"):
            _plan(tmp_path, content, max_batch_size=1)
        wanted = (OutputConfig("y", DataType.FP32, (2,)),)
        assert _plan(tmp_path, content, max_batch_size=1, outputs=wanted).recipes[0].output_names == ("y",)

    def test_the_configurations_outputs(self, tmp_path: Path) -> None:
        wanted = tuple(OutputConfig(name, DataType.FP32, (2,)) for name in ("doubled:0", "picture"))
        plan = _plan(tmp_path, graphdef.brightening(), max_batch_size=1, outputs=wanted)
        assert [tensor.name for tensor in plan.outputs] == ["doubled:0", "picture"]
        assert plan.recipes[0].output_names == ("doubled", "picture")
        unknown = (OutputConfig("nothing", DataType.FP32, (2,)),)
        plan = _plan(tmp_path, graphdef.brightening(), max_batch_size=1, outputs=unknown)
        assert plan.recipes[0].output_names == ("brighter", "doubled")
