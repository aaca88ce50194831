"""What ONNX Runtime's CPU provider tells of a file: whether its rows depend on each other, and its answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from support.waiting import PATIENCE_SECONDS

from rocserve.backends.onnx.reference_job import OnnxReferenceJob, OnnxReferenceResult
from rocserve.load_check.reference import load_cases
from rocserve.load_check.rows import Independence


def model(
    *nodes: onnx.NodeProto, rows: tuple[int | str, int | str] = ("n", "n"), kind: int = TensorProto.FLOAT
) -> bytes:
    """`x` [rows, 2] -> `y` [rows, 2]."""
    x = helper.make_tensor_value_info("x", kind, [rows[0], 2])
    y = helper.make_tensor_value_info("y", kind, [rows[1], 2])
    zero = numpy_helper.from_array(np.array(0), "zero")
    graph = helper.make_graph(nodes, "graph", [x], [y], [zero])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
    made.ir_version = 8
    return made.SerializeToString()


DOUBLED = helper.make_node("Add", ["x", "x"], ["y"])
SUMMED = helper.make_node("CumSum", ["x", "zero"], ["y"])


def perform(
    folder: Path, content: bytes, shape: Sequence[int] = (2,), rows: int = 3, checks_rows: bool = True
) -> OnnxReferenceResult:
    path = folder / "model.onnx"
    path.write_bytes(content)
    cases_file = str(folder / "cases.npz")
    job = OnnxReferenceJob("m", str(path), {"x": tuple(shape)}, checks_rows, cases_file, rows, PATIENCE_SECONDS)
    return job.perform(lambda phase: None)


def test_cases_are_what_the_model_computes(tmp_path: Path) -> None:
    found = perform(tmp_path, model(DOUBLED))
    cases = load_cases(tmp_path / "cases.npz")
    assert found.cases == len(cases) >= 5
    for case in cases:
        assert case.feed["x"].shape == (3, 2)
        np.testing.assert_array_equal(case.outputs["y"], case.feed["x"] * 2)


def test_rows_that_depend_on_each_other(tmp_path: Path) -> None:
    found = perform(tmp_path, model(SUMMED)).rows
    assert found is not None and found.state is Independence.DEPENDENT
    assert "output 'y'" in found.reason
    independent = perform(tmp_path, model(DOUBLED)).rows
    assert independent is not None and independent.state is Independence.INDEPENDENT


def test_names_of_people_decide_before_an_experiment(tmp_path: Path) -> None:
    found = perform(tmp_path, model(DOUBLED, rows=("batch", "time"))).rows
    assert found is not None and found.state is Independence.DEPENDENT
    assert found.reason == "rows depend on each other: output 'y' has 'time' rows, input 'x' has 'batch'"


def test_a_file_that_fixes_its_rows_is_run_with_these(tmp_path: Path) -> None:
    independent = perform(tmp_path, model(DOUBLED, rows=(4, 4)), rows=4).rows
    dependent = perform(tmp_path, model(SUMMED, rows=(4, 4)), rows=4).rows
    assert independent is not None and independent.state is Independence.INDEPENDENT
    assert dependent is not None and dependent.state is Independence.DEPENDENT


def test_a_model_without_rows(tmp_path: Path) -> None:
    found = perform(tmp_path, model(SUMMED, rows=(5, 5)), (5, 2), rows=0, checks_rows=False)
    assert found.rows is None
    assert all(case.feed["x"].shape == (5, 2) for case in load_cases(tmp_path / "cases.npz"))


def test_bf16_is_computed_from_its_bits(tmp_path: Path) -> None:
    relu = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.BFLOAT16)
    perform(tmp_path, model(relu, kind=TensorProto.BFLOAT16))
    plain, *_ = load_cases(tmp_path / "cases.npz")
    assert plain.feed["x"].dtype == np.uint16 and plain.outputs["y"].dtype == np.float32
    np.testing.assert_array_equal((plain.feed["x"].astype(np.uint32) << 16).view(np.float32), plain.outputs["y"])


def test_there_is_no_reference_of_what_onnx_runtime_does_not_run(tmp_path: Path) -> None:
    unknown = perform(tmp_path, model(helper.make_node("MyFancyOp", ["x"], ["y"])))
    assert (unknown.rows, unknown.cases) == (None, 0)
    assert unknown.reason.startswith("ONNX Runtime cannot open it: ") and "MyFancyOp" in unknown.reason
    never = perform(tmp_path, model(helper.make_node("Reshape", ["x", "zero"], ["y"])))
    assert never.cases == 0 and "no made-up input runs" in never.reason


def test_rows_are_tried_in_the_largest_batch_that_is_configured(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Constant", [], ["n200"], value_int=200),
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "zero"], ["n"]),
        helper.make_node("Div", ["n", "n200"], ["k"]),
        helper.make_node("Cast", ["k"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["x", "f"], ["y"]),
    ]
    path = tmp_path / "model.onnx"
    path.write_bytes(model(*nodes))
    states = []
    for largest in (64, 256):
        cases_file = str(tmp_path / "cases.npz")
        job = OnnxReferenceJob(
            "m", str(path), {"x": (2,)}, True, cases_file, 3, PATIENCE_SECONDS, largest_batch=largest
        )
        found = job.perform(lambda phase: None)
        assert found.rows is not None
        states.append(found.rows.state)
    assert states == [Independence.INDEPENDENT, Independence.DEPENDENT]
