"""The load check of MIGraphX's models, on the real engine (target ref) and ONNX Runtime: what is refused, what is
served with a warning, and which batches are formed."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support import migraphx_models
from support.graphdef import GraphDef, classifier
from support.migraphx_engine import Engine, answers, wait_for_all_sizes
from support.migraphx_serving import compiled

from rocserve.backends.base import Batch
from rocserve.backends.migraphx import model_check
from rocserve.backends.migraphx.compiling.check_jobs import COMPARING
from rocserve.backends.migraphx.compiling.compile_job import CompileJob
from rocserve.backends.migraphx.compiling.context import open_compile_context
from rocserve.backends.migraphx.model import load_compiled
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.load_check import LoadCheckFailed, LoadCheckReport
from rocserve.core.tensors import tensor_from_numpy
from rocserve.jobs.messages import JobError
from rocserve.settings import EngineSettings

pytestmark = [pytest.mark.in_migraphx_process, pytest.mark.long, pytest.mark.usefixtures("jobs_here")]


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path, tmp_path / "cache")


def network(*nodes: onnx.NodeProto, rows: int | str = "n") -> bytes:
    """`x` FP32 [rows, 2] -> `y` FP32 [rows, 2]."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [rows, 2]) for name in "xy")
    graph = helper.make_graph(nodes, "graph", [x], [y], [numpy_helper.from_array(np.array(0), "zero")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
    model.ir_version = 8
    return model.SerializeToString()


SOFTPLUS = network(helper.make_node("Softplus", ["x"], ["y"]))
"""MIGraphX computes log(exp(x) + 1), which is inf from 88.8 on."""
DOUBLED = network(helper.make_node("Add", ["x", "x"], ["y"]))
SUMMED = network(helper.make_node("CumSum", ["x", "zero"], ["y"]))


def scalars() -> bytes:
    node = helper.make_node("DynamicQuantizeLinear", ["x"], ["y", "s", "z"])
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])
    given = (("y", TensorProto.UINT8, [2, 3]), ("s", TensorProto.FLOAT, []), ("z", TensorProto.UINT8, []))
    outputs = [helper.make_tensor_value_info(name, kind, shape) for name, kind, shape in given]
    graph = helper.make_graph([node], "graph", [x], outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
    model.ir_version = 8
    return model.SerializeToString()


class TestReference:
    def test_a_program_that_computes_something_else_is_refused_with_output_and_values(self, engine: Engine) -> None:
        with pytest.raises(LoadCheckFailed) as failed:
            engine.load(SOFTPLUS)
        assert (failed.value.kind, failed.value.code) == ("reference", StatusCode.INVALID_ARGUMENT)
        text = failed.value.text
        assert (
            "does not compute what ONNX Runtime computes: batch size 1: output 'y' is wrong with large inputs" in text
        )
        assert "inf instead of " in text
        engine.reports.clear()
        with pytest.raises(LoadCheckFailed) as again:
            engine.load(SOFTPLUS)
        assert again.value.text == text
        assert not engine.reports, "neither is compiled nor compared again"

    def test_the_other_engine_is_recommended_only_if_this_one_is_named(self, engine: Engine) -> None:
        for parameters, is_named in (({}, False), ({"engine": "auto"}, False), ({"engine": "migraphx"}, True)):
            with pytest.raises(LoadCheckFailed) as failed:
                engine.load(SOFTPLUS, **parameters)
            assert ("let ONNX Runtime run the model" in failed.value.text) is is_named
            assert "set parameter 'load_check' to \"warn\" to serve it anyway" in failed.value.text

    def test_a_scalar_has_no_dimensions_though_migraphx_gives_it_one(self, engine: Engine) -> None:
        model = engine.load(scalars())
        assert [(tensor.name, tensor.shape) for tensor in model.signature.outputs] == [
            ("y", (2, 3)),
            ("s", ()),
            ("z", ()),
        ]
        found = answers(model, {"x": np.array([[0, 1, 2], [3, 4, 51]], np.float32)})
        assert (found["s"].shape, found["z"].shape) == ((), ())
        # A step is a 255th of the range from 0 to 51.
        np.testing.assert_allclose(found["s"], 0.2, rtol=1e-6)
        np.testing.assert_array_equal(found["y"], [[0, 5, 10], [15, 20, 255]])

    def test_warn_serves_it_and_off_does_not_look(self, engine: Engine) -> None:
        warned = engine.load(SOFTPLUS, load_check="warn")
        assert warned.load_check.failures == ("reference",)
        assert "MIGraphX's answers differ from ONNX Runtime's: output 'y' is wrong" in warned.load_check.warning
        np.testing.assert_allclose(answers(warned, {"x": np.zeros((1, 2), np.float32)})["y"], np.log(2), rtol=1e-5)
        assert engine.load(SOFTPLUS, load_check="off").load_check == LoadCheckReport()

    def test_what_was_found_is_reported_and_kept(self, engine: Engine) -> None:
        first = engine.load(DOUBLED).load_check
        assert first.parts[0] == "rows are independent"
        assert first.parts[1].endswith(" inputs on MIGraphX and ONNX Runtime, largest error 0e+00")
        assert (first.warning, first.failures) == ("", ())
        assert first.seconds > 0
        assert engine.load(DOUBLED).load_check == replace(first, seconds=0.0)

    def test_the_cases_are_removed_with_the_last_program(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(engine.folder))
        (engine.folder / "rocserve-check-of-a-killed-process").mkdir()
        model = engine.load(DOUBLED, 2)
        assert len([*engine.folder.glob("rocserve-check-*/*.npz")]) == len([*engine.folder.glob("rocserve-check-*")])
        model.warm_up([])
        wait_for_all_sizes()
        assert model.properties["batch_sizes"] == "1, 2"
        assert not [*engine.folder.glob("rocserve-check-*")]

    def test_a_program_that_was_compiled_without_a_check_is_checked_when_it_is_loaded(self, engine: Engine) -> None:
        engine.load(SOFTPLUS, load_check="off")
        engine.reports.clear()
        with pytest.raises(LoadCheckFailed, match="output 'y' is wrong with large inputs"):
            engine.load(SOFTPLUS)
        assert not any("compiling" in text for text in engine.reports)

    def test_a_process_that_ends_in_the_comparison_is_a_verdict(self, engine: Engine) -> None:
        context = open_compile_context(engine.source(DOUBLED), logging.getLogger("test"))
        run = context.compiler.runner.run

        def dies(job: Any, *arguments: Any, **options: Any) -> Any:
            if isinstance(job, CompileJob) and job.trial is not None:
                raise JobError(
                    StatusCode.UNAVAILABLE, f"{job.title} failed while {COMPARING}: ended by signal 11", True
                )
            return run(job, *arguments, **options)

        context.compiler.runner.run = dies  # type: ignore[method-assign]
        for _ in range(2):
            with pytest.raises(LoadCheckFailed, match="ended by signal 11"):
                load_compiled(context)
            context.compiler.runner.run = run  # type: ignore[method-assign]
        warned = engine.load(DOUBLED, load_check="warn")
        assert "ended by signal 11" in warned.load_check.warning

    def test_a_reference_that_takes_too_long_leaves_rows_undecided_and_nothing_compared(self, engine: Engine) -> None:
        """Rows are not tried on MIGraphX instead, which would have to compile another program first."""
        context = open_compile_context(engine.source(DOUBLED, 2), logging.getLogger("test"))
        late = "running model 'model' on ONNX Runtime took longer than load_check_seconds"

        def takes_too_long(*arguments: Any, **options: Any) -> Any:
            raise JobError(StatusCode.UNAVAILABLE, late)

        context.onnxruntime.run = takes_too_long  # type: ignore[method-assign]
        model = load_compiled(context)
        assert model.load_check.parts == (f"not checked: {late}", f"not compared: {late}")
        assert not any("checking the rows" in text for text in engine.reports)
        # Nothing of it is remembered.
        assert engine.load(DOUBLED).load_check.parts[0] == "rows are independent"

    def test_without_onnx_runtime_nothing_is_compared_and_rows_run_on_migraphx(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(model_check, "is_installed", lambda module: False)
        report = engine.load(SOFTPLUS).load_check
        assert report.parts == ("rows are independent", "not compared: ONNX Runtime is not installed")
        with pytest.raises(ServeError, match="it is not a batch: rows depend on each other"):
            engine.load(SUMMED)

    def test_a_compiled_file_is_held_against_the_onnx_file_beside_it(self, engine: Engine, migraphx_root: Path) -> None:
        program = compiled(migraphx_root, DOUBLED, engine.folder, batch=2)
        engine.write("model.onnx", DOUBLED)
        right = engine.load(program, 2, filename="model.mxr", backend="migraphx")
        assert right.load_check.parts[-1].endswith("inputs on MIGraphX and ONNX Runtime, largest error 0e+00")
        engine.write("model.onnx", network(helper.make_node("Neg", ["x"], ["y"])))
        other = engine.load(program, 2, filename="model.mxr", backend="migraphx")
        assert "model.onnx is compiled instead of model.mxr" in other.properties["note"]
        np.testing.assert_array_equal(answers(other, {"x": np.ones((1, 2), np.float32)})["y"], [[-1, -1]])


class TestRows:
    def test_rows_that_depend_on_each_other_are_no_batch(self, engine: Engine) -> None:
        with pytest.raises(ServeError) as refused:
            engine.load(SUMMED)
        assert "dimension 0 ('n') of input 'x' is left open by the model" in refused.value.text
        assert "it is not a batch: rows depend on each other: output 'y'" in refused.value.text
        model = engine.load(SUMMED, input_shapes="x: 3x2")
        assert not model.signature.supports_batching
        x = np.arange(6, dtype=np.float32).reshape(3, 2)
        np.testing.assert_array_equal(answers(model, {"x": x})["y"], x.cumsum(0))

    def test_a_written_batch_is_served_with_a_warning_and_each_request_by_itself(self, engine: Engine) -> None:
        model = engine.complete(SUMMED, 4)
        assert model.load_check.failures == ("rows",)
        assert model.load_check.warning.startswith("batched as configured, but rows depend on each other: output 'y'")
        assert model.signature.dependent_rows.startswith("rows depend on each other: output 'y'")
        x = np.arange(1, 9, dtype=np.float32).reshape(4, 2)
        for rows in (1, 2, 4):
            np.testing.assert_array_equal(answers(model, {"x": x[:rows]})["y"], x[:rows].cumsum(0))
        with pytest.raises(ServeError, match=r"got 3 rows, .* neither padded nor cut .* parameter 'batch_sizes'"):
            answers(model, {"x": x[:3]})
        tensors = {"x": tensor_from_numpy("x", np.concatenate([x[:2], x[:1], x[:3]]))}
        found = model.execute(Batch(tensors, ("y",), (2, 1, 3)))
        np.testing.assert_array_equal(found.outputs["y"][:3], [*x[:2].cumsum(0), x[0]])
        assert list(found.failures) == [2]
        assert len(found.outputs["y"]) == 6

    def test_graphs_without_a_reference_are_tried_on_migraphx(self, engine: Engine) -> None:
        graph = {"filename": "model.graphdef", "backend": "tensorflow"}
        model = engine.load(classifier(), **graph)
        assert model.signature.supports_batching
        assert model.load_check.parts == ("rows are independent", "not compared: no other engine runs it")
        summed = GraphDef()
        summed.placeholder("x", [-1, 2])
        summed.constant("axis", np.array([0], np.int32))
        summed.node("Mean", "mean", "x", "axis", keep_dims=True)
        summed.node("Sub", "y", "x", "mean")
        with pytest.raises(ServeError, match="it is not a batch: rows depend on each other: output 'y'"):
            engine.load(summed.serialized(), **graph)

    def test_a_batch_that_the_file_fixes(self, engine: Engine) -> None:
        fixed = network(helper.make_node("CumSum", ["x", "zero"], ["y"]), rows=2)
        model = engine.load(fixed, 2, batch_sizes="2")
        assert model.load_check.failures == ("rows",)
        with pytest.raises(ServeError, match="neither padded nor cut"):
            answers(model, {"x": np.ones((1, 2), np.float32)})


def test_the_time_of_a_check_is_bounded(engine: Engine) -> None:
    source = engine.source(migraphx_models.mini_resnet())
    bounded = replace(source, settings=replace(engine.settings, load_check_seconds=1e-9))
    assert isinstance(bounded.settings, EngineSettings)
    with pytest.raises(ServeError, match="it is not a batch: not checked: "):
        load_compiled(open_compile_context(bounded, logging.getLogger("test")))
