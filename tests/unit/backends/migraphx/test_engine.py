"""ONNX models on the real engine, target ref, compared with ONNX Runtime."""

from __future__ import annotations

import gc
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import psutil
import pytest
from onnx import TensorProto
from support import migraphx_models
from support.migraphx_engine import Engine, answers, batch, given, wait_for_all_sizes, wanted
from support.migraphx_serving import expected
from support.models import graph

from rocserve.backends.migraphx.compiling.recipe import ProgramRecipe
from rocserve.backends.migraphx.program_runner import LoadedProgram
from rocserve.backends.onnx.model_file import ModelFile
from rocserve.backends.onnx.signature import session_signature
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.load_check import LoadCheckFailed
from rocserve.core.model_config import ModelConfig
from rocserve.core.requests import TensorSpec

pytestmark = [pytest.mark.in_migraphx_process, pytest.mark.long, pytest.mark.usefixtures("jobs_here")]

FP32 = DataType.FP32

NETWORKS = {
    "resnet": migraphx_models.mini_resnet(),
    "mlp": migraphx_models.mlp(),
    "two": migraphx_models.two_in_two_out(),
}


@pytest.fixture
def first_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine with an empty cache."""
    # Nor is there anything that others have compiled while their cache was full.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return Engine(tmp_path, tmp_path / "cache")


class TestBatches:
    @pytest.mark.parametrize("name", NETWORKS)
    def test_answers_are_those_of_onnx_runtime_at_every_size(self, engine: Engine, name: str) -> None:
        network = NETWORKS[name]
        model = engine.complete(network, 2)
        assert model.properties["batch_sizes"] == "1, 2"
        for rows in (1, 2, 3, 5):
            inputs = migraphx_models.random_inputs(network, rows, seed=rows)
            found = answers(model, inputs)
            assert list(found) == list(expected(network, inputs))
            for output, values in expected(network, inputs).items():
                np.testing.assert_allclose(found[output], values, rtol=1e-4, atol=1e-4)
        model.close()

    def test_it_is_ready_with_the_first_size_says_what_goes_on_and_compiles_once(self, first_engine: Engine) -> None:
        model = first_engine.load(NETWORKS["mlp"], 2)
        assert model.properties["batch_sizes"] == "1"
        assert any("compiling batch size 1 of model 'model'" in text for text in first_engine.reports)
        assert first_engine.reports[-1] == ""
        inputs = migraphx_models.random_inputs(NETWORKS["mlp"], 2)
        first = answers(model, inputs)["scores"]
        first_engine.reports.clear()
        model.warm_up([])
        wait_for_all_sizes()
        assert first_engine.reports[0] == "serving; batch sizes still to compile: 2"
        assert first_engine.reports[-1] == ""
        assert model.properties["batch_sizes"] == "1, 2"
        np.testing.assert_array_equal(answers(model, inputs)["scores"], first)
        model.close()
        first_engine.reports.clear()
        first_engine.complete(NETWORKS["mlp"], 2).close()
        assert first_engine.reports == ["", "serving; batch sizes still to compile: 2", ""]

    @pytest.mark.parametrize(("largest", "names"), [(2, ("1 (tuned), 2", "2")), (0, ("all (tuned)",))])
    def test_it_serves_an_untuned_program_until_the_tuned_one_is_compiled(
        self, first_engine: Engine, monkeypatch: pytest.MonkeyPatch, largest: int, names: tuple[str, ...]
    ) -> None:
        """As on a GPU; the target ref measures nothing."""

        def untuned(recipe: ProgramRecipe) -> ProgramRecipe:
            variables = {"MIGRAPHX_SKIP_BENCHMARKING": "1"}
            return replace(recipe, environment=replace(recipe.environment, variables=variables))

        monkeypatch.setattr(ProgramRecipe, "untuned", property(untuned))
        network = NETWORKS["mlp"] if largest else migraphx_models.without_batch()
        before = {id(one) for one in loaded_programs()}
        model = first_engine.load(network, largest)
        sizes = model.properties.get("batch_sizes")
        first_engine.reports.clear()
        model.warm_up([])
        wait_for_all_sizes()
        assert [*dict.fromkeys(text.partition("; compiling")[0] for text in first_engine.reports)] == [
            *(f"serving; batch sizes still to compile: {name}" for name in names),
            "",
        ]
        assert (sizes, model.properties.get("batch_sizes")) == (("1", "1, 2") if largest else (None, None))
        # The tuned program has replaced the untuned one.
        assert len({id(one) for one in loaded_programs()} - before) == max(largest, 1)
        model.close()
        # Another server finds the tuned program in the cache.
        first_engine.reports.clear()
        first_engine.complete(network, largest).close()
        assert not [text for text in first_engine.reports if "tuned" in text or "compiling" in text]

    def test_samples_of_the_configuration_warm_it_up(self, engine: Engine) -> None:
        model = engine.load(NETWORKS["mlp"], 1)
        wrong = batch({"x": np.zeros((1, 3), np.float32)})
        with pytest.raises(ServeError, match=r"input 'x' of model 'model' must have the shape \[rows, 16\]"):
            model.warm_up([wrong])

    def test_closing_frees_the_programs_and_their_buffers(self, engine: Engine) -> None:
        before = {id(one) for one in loaded_programs()}
        model = engine.complete(NETWORKS["mlp"], 2)
        answers(model, migraphx_models.random_inputs(NETWORKS["mlp"], 2))
        assert len({id(one) for one in loaded_programs()} - before) == 2
        model.close()
        assert not {id(one) for one in loaded_programs()} - before
        assert model.properties["batch_sizes"] == "1, 2"

    @pytest.mark.usefixtures("jobs_in_children")
    def test_closing_calls_off_what_is_being_compiled(self, engine: Engine) -> None:
        model = engine.load(migraphx_models.slow_to_compile(from_batch=2), 2, load_check="off")
        model.warm_up([])
        model.close()
        assert not psutil.Process().children(recursive=True)


def loaded_programs() -> list[LoadedProgram]:
    gc.collect()
    return [one for one in gc.get_objects() if isinstance(one, LoadedProgram)]


class TestSignatures:
    def test_a_symbolic_batch_is_any(self, engine: Engine) -> None:
        signature = engine.load(NETWORKS["two"], 1).signature
        assert signature.inputs == (TensorSpec("left", FP32, (-1, 4)), TensorSpec("right", FP32, (-1, 4)))
        assert signature.outputs == (TensorSpec("difference", FP32, (-1, 4)), TensorSpec("product", FP32, (-1, 6)))
        assert signature.supports_batching

    @pytest.mark.parametrize("max_batch_size", [0, 2])
    @pytest.mark.parametrize(
        "network", [*NETWORKS.values(), migraphx_models.identity(TensorProto.INT64), migraphx_models.without_batch()]
    )
    def test_they_are_those_of_onnx_runtime(
        self, engine: Engine, network: bytes, max_batch_size: int, tmp_path: Path
    ) -> None:
        """So a configuration is completed in the same way by both engines."""
        model = engine.load(network, max_batch_size)
        config = ModelConfig(name="model", max_batch_size=max_batch_size)
        theirs = session_signature(onnxruntime.InferenceSession(network), config, ModelFile(tmp_path))
        assert model.signature == theirs

    def test_a_configuration_that_says_nothing_gets_small_programs_that_run_any_batch(self, engine: Engine) -> None:
        model = engine.complete(NETWORKS["mlp"])
        assert model.signature.supports_batching
        assert model.properties["batch_sizes"] == "1, 2, 4"
        inputs = migraphx_models.random_inputs(NETWORKS["mlp"], 64)
        np.testing.assert_allclose(
            answers(model, inputs)["scores"], expected(NETWORKS["mlp"], inputs)["scores"], rtol=1e-4, atol=1e-4
        )

    @pytest.mark.usefixtures("jobs_in_children")
    def test_outputs_have_the_shapes_that_the_values_of_the_inputs_give_them(self, engine: Engine) -> None:
        network = migraphx_models.cutting()
        for name in ("", " auto "):
            with pytest.raises(
                ServeError, match="depends on the values of the inputs; MIGraphX computes some of these wrongly"
            ):
                engine.load(network, engine=name, load_check="off")
        with pytest.raises(LoadCheckFailed, match="does not compute what ONNX Runtime computes"):
            engine.load(network, engine="migraphx")
        model = engine.complete(network, engine="migraphx", load_check="warn")
        assert [spec.shape for spec in model.signature.outputs] == [(-1, -1)] * 2
        for ends, axis in ((2, 3), 0), ((4, 1), 1), ((0, 3), 1):
            inputs = {"x": np.arange(12).reshape(4, 3), "ends": np.array(ends), "axes": np.array([axis])}
            found, exact = answers(model, inputs), expected(network, inputs)
            assert {name: values.tolist() for name, values in found.items()} == {
                name: values.tolist() for name, values in exact.items()
            }
        assert list(answers(model, inputs, "sums")) == ["sums"]

    def test_a_batch_whose_shapes_only_values_tell_is_refused_at_load(self, engine: Engine) -> None:
        """ONNX Runtime takes the model over, if it may."""
        with pytest.raises(ServeError, match=r"the shape of output 'y' of model 'model' depends on the values of its"):
            engine.load(migraphx_models.cutting_rows(), 2)

    def test_other_symbolic_dimensions_get_their_numbers_from_the_parameter(self, engine: Engine) -> None:
        model = engine.complete(migraphx_models.any_length(), 2, input_shapes="x: 5")
        values = np.arange(10, dtype=np.float32).reshape(2, 5)
        np.testing.assert_array_equal(answers(model, {"x": values})["y"], 2 * values)
        with pytest.raises(ServeError, match=r"must have the shape \[rows, 5\] that the model is compiled for"):
            answers(model, {"x": np.zeros((2, 6), np.float32)})

    def test_a_dimension_that_the_configuration_leaves_open_stays_open(self, engine: Engine) -> None:
        signature = engine.load(
            migraphx_models.any_length(), 2, input_shapes="x: 5", inputs=(given("x", -1),), outputs=(wanted("y", -1),)
        ).signature
        assert signature.inputs == (TensorSpec("x", FP32, (-1, -1)),)

    def test_datatypes(self, engine: Engine) -> None:
        names = ("FLOAT", "DOUBLE", "FLOAT16", "BFLOAT16", "INT8", "INT32", "INT64", "UINT8", "BOOL")
        tensors = {name: (TensorProto.DataType.Value(name), ["batch", 4]) for name in names}
        nodes = [onnx.helper.make_node("Identity", [name], [f"out_{name}"]) for name in names]
        network = graph(nodes, tensors, {f"out_{name}": tensor for name, tensor in tensors.items()})
        model = engine.load(network, 1, load_check="off")
        ours = ("FP32", "FP64", "FP16", "BF16", "INT8", "INT32", "INT64", "UINT8", "BOOL")
        datatypes = [DataType(name) for name in ours]
        assert [spec.datatype for spec in (*model.signature.inputs, *model.signature.outputs)] == datatypes * 2
        given = {name: np.array([[0, 1, 1, 0]], one.numpy_dtype) for name, one in zip(names, datatypes, strict=True)}
        found = answers(model, given)
        for name, values in given.items():
            assert found[f"out_{name}"].dtype == values.dtype
            np.testing.assert_array_equal(found[f"out_{name}"], values)

    def test_an_input_that_nothing_depends_on_is_taken_and_left_alone(self, engine: Engine) -> None:
        network = onnx.load_from_string(migraphx_models.identity())
        network.graph.input.append(onnx.helper.make_tensor_value_info("unused", TensorProto.INT64, ["batch", 2]))
        model = engine.load(network.SerializeToString(), 1)
        assert model.signature.inputs[1] == TensorSpec("unused", DataType.INT64, (-1, 2))
        inputs = {"x": np.ones((1, 4), np.float32), "unused": np.ones((1, 2), np.int64)}
        np.testing.assert_array_equal(answers(model, inputs)["y"], inputs["x"])


class TestWhatCannotBeHad:
    def test_a_size_that_is_wrong_leaves_the_right_ones_in_service(self, engine: Engine) -> None:
        network = migraphx_models.reshaped_to_constant()
        model = engine.complete(network, 4)
        assert model.properties["batch_sizes"] == "1"
        assert engine.reports[-1].startswith("serving without batch sizes 2, 4: ")
        inputs = migraphx_models.random_inputs(network, 2)
        np.testing.assert_allclose(answers(model, inputs)["y"], (inputs["x"] ** 2).reshape(2, 6), rtol=1e-5)

    def test_a_files_own_batch_comes_first_and_suffices(self, engine: Engine) -> None:
        network = migraphx_models.reshaped_to_constant(batch=2)
        model = engine.complete(network, 2)
        assert model.properties["batch_sizes"] == "2"
        assert engine.reports[-1].startswith("serving without batch size 1: ")
        inputs = migraphx_models.random_inputs(network, 3)
        np.testing.assert_allclose(answers(model, inputs)["y"], (inputs["x"] ** 2).reshape(3, 6), rtol=1e-5)
