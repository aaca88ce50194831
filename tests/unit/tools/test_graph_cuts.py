"""Cuts of ONNX graphs, and the search for the first operator that differs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from rocserve.core.errors import ServeError
from rocserve.verbs.check.graph_cuts import CutGraph, read_model, title, write_model
from rocserve.verbs.check.operator_search import CutResult, TensorFinding, farthest, first_difference

_X = np.array([[1.0, -2.0, 3.0], [0.5, 0.25, -1.0]], np.float32)


def _model(nodes: Sequence[onnx.NodeProto], outputs: Sequence[str], **weights: object) -> onnx.ModelProto:
    """`x` FP32 [rows, 3] -> outputs whose types are left to inference."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 3])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _two_branches() -> onnx.ModelProto:
    return _model(
        [
            helper.make_node("Abs", ["x"], ["a"]),
            helper.make_node("Constant", [], ["two"], value_float=2.0),
            helper.make_node("Mul", ["a", "two"], ["b"], name="double"),
            helper.make_node("Neg", ["x"], ["c"]),
            helper.make_node("MatMul", ["b", "weights"], ["d"]),
            helper.make_node("Add", ["d", "c"], ["y"]),
        ],
        ["b", "y"],
        weights=np.eye(3, dtype=np.float32),
        unused=np.ones(3, np.float32),
    )


def _run(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {"x": _X}), strict=True))


def test_each_cut_runs_and_hands_on_what_later_operators_need() -> None:
    graph = CutGraph(_two_branches(), {"x": _X})
    # The constant depends on no input; `b` is an output of the graph, so it stays.
    assert [graph.front(count) for count in range(1, 7)] == [
        ("a",), ("a",), ("b",), ("b", "c"), ("b", "c", "d"), ("b", "y"),
    ]  # fmt: skip
    whole = _run(_two_branches())
    for count in graph.cuts:
        outputs = _run(graph.until(count))
        assert tuple(outputs) == graph.front(count)
        assert all(np.array_equal(outputs[name], whole[name]) for name in outputs.keys() & whole.keys())
    assert [one.name for one in graph.until(5).graph.initializer] == ["weights"]
    assert not graph.until(4).graph.initializer
    assert title(graph.operators[2]) == "Mul 'double' (a, two -> b)"


def test_a_cut_takes_only_the_inputs_that_it_uses() -> None:
    model = _two_branches()
    model.graph.input.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, ["rows"]))
    model.graph.node.append(helper.make_node("Add", ["y", "z"], ["last"]))
    graph = CutGraph(model, {"x": _X, "z": np.ones(3, np.float32)})
    assert [one.name for one in graph.until(6).graph.input] == ["x"]


def test_inner_graphs_keep_the_tensors_that_they_take_from_outside() -> None:
    inner = [
        helper.make_graph(
            [helper.make_node(kind, ["a"], ["inside"])],
            kind,
            [],
            [helper.make_tensor_value_info("inside", TensorProto.FLOAT, None)],
        )
        for kind in ("Neg", "Exp")
    ]
    model = _model(
        [
            helper.make_node("Abs", ["x"], ["a"]),
            helper.make_node("ReduceMax", ["x"], ["most"], keepdims=0),
            helper.make_node("Less", ["most", "limit"], ["small"]),
            helper.make_node("If", ["small"], ["y"], then_branch=inner[0], else_branch=inner[1]),
        ],
        ["y"],
        limit=np.float32(5),
    )
    graph = CutGraph(model, {"x": _X})
    assert graph.front(3) == ("a", "small")
    assert np.array_equal(_run(graph.until(4))["y"], -np.abs(_X))


def test_no_cut_lies_where_a_sequence_would_be_handed_on() -> None:
    model = _model(
        [
            helper.make_node("SplitToSequence", ["x"], ["parts"], axis=1),
            helper.make_node("ConcatFromSequence", ["parts"], ["joined"], axis=1),
            helper.make_node("Neg", ["joined"], ["y"]),
        ],
        ["y"],
    )
    assert CutGraph(model, {"x": _X}).cuts == [2, 3]


def test_a_cut_has_the_external_weights_that_it_uses(tmp_path: Path) -> None:
    onnx.save(_two_branches(), tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    graph = CutGraph(read_model(tmp_path / "m.onnx"), {"x": _X})
    cut = tmp_path / "cut"
    cut.mkdir()
    write_model(graph.until(6), cut / "cut.onnx", tmp_path)
    assert np.array_equal(_run(onnx.load(cut / "cut.onnx"))["y"], 2 * np.abs(_X) - _X)
    assert [path.name for path in cut.iterdir()] == ["cut.onnx"]
    (tmp_path / "m.data").unlink()
    with pytest.raises(ServeError, match="its weights cannot be read: "):
        write_model(graph.until(6), cut / "cut.onnx", tmp_path)


def _examining(differing: Callable[[int], Sequence[str]], unable: Sequence[int] = ()) -> Callable[[int], object]:
    async def examine(count: int) -> CutResult | None:
        if count in unable:
            return None
        return CutResult([TensorFinding(name, (), (), 1.0, "plain", ()) for name in differing(count)])

    return examine


@pytest.mark.parametrize("wrong", range(1, 21))
@pytest.mark.parametrize("unable", [(), (5, 10, 11)])
def test_the_search_finds_each_operator(wrong: int, unable: Sequence[int]) -> None:
    nodes = [helper.make_node("Neg", [f"t{i}" if i else "x"], [f"t{i + 1}"]) for i in range(20)]
    graph = CutGraph(_model(nodes, ["t20"]), {"x": _X})
    examine = _examining(lambda count: [f"t{count}"] if count >= wrong else [], unable)
    found = asyncio.run(first_difference(graph, examine))  # type: ignore[arg-type]
    assert found is not None
    # A cut that the reference cannot run is left out: the next one takes its place.
    expected = next(count for count in range(wrong, 21) if count not in unable)
    assert (found.number, found.operators) == (expected, 20)
    assert [tensor.name for tensor in found.tensors] == [f"t{expected}"]


def test_the_search_finds_nothing_in_equal_graphs() -> None:
    graph = CutGraph(_two_branches(), {"x": _X})
    assert asyncio.run(first_difference(graph, _examining(lambda _: []))) is None  # type: ignore[arg-type]


def test_an_operator_at_which_the_engine_ends_is_named() -> None:
    graph = CutGraph(_two_branches(), {"x": _X})

    async def examine(count: int) -> CutResult:
        return CutResult(failure="its worker was killed by SIGSEGV" if count >= 4 else "")

    found = asyncio.run(first_difference(graph, examine))
    assert found is not None
    assert found.operator == "Neg (x -> c)"
    assert found.failure == "its worker was killed by SIGSEGV"


def test_the_farthest_values_are_shown_first() -> None:
    expected = np.array([[1.0, 2.0, np.nan], [4.0, 5.0, 6.0]], np.float32)
    actual = np.array([[1.0, 2.5, np.nan], [np.inf, 5.25, 6.0]], np.float32)
    values = farthest(expected, actual)
    assert [(one.index, one.expected, one.actual) for one in values] == [
        ((1, 0), "4", "inf"), ((0, 1), "2", "2.5"), ((1, 1), "5", "5.25"),
    ]  # fmt: skip
    assert [one.actual for one in farthest(expected[0], actual[0])] == ["2.5"]
    assert farthest(expected, actual[:1]) == ()
    texts = [np.array(["a", "b"], object), np.array(["a", "c"], object)]
    assert farthest(*texts)[0].actual == "c"
