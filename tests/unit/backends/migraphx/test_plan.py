"""The programs planned for a model: sizes, shapes, order, and what cannot be planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from support import migraphx_models
from support.encoders import encoder

from rocserve.backends.base import ModelSource
from rocserve.backends.migraphx.compiling.graph import GraphTensor
from rocserve.backends.migraphx.compiling.memory import planned_memory
from rocserve.backends.migraphx.compiling.plan import ProgramPlan, plan_programs
from rocserve.backends.migraphx.compiling.recipe import ProgramEnvironment, SourceKind
from rocserve.backends.migraphx.options import Target, compile_options, serving_options
from rocserve.cache.digests import file_digest
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import InputConfig, InstanceKind, ModelConfig, OutputConfig

_ENVIRONMENT = ProgramEnvironment("2.14.0")
_INT8 = {"parameters": {"precision": "int8", "calibration_data": "samples.npz"}}


class Folder:
    """A model's folder; `plan` writes the file and plans its programs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.version = path / "1"
        self.version.mkdir(parents=True)

    def plan(self, content: bytes, filename: str = "model.onnx", **config: Any) -> ProgramPlan:
        file = self.version / filename
        file.write_bytes(content)
        complete = ModelConfig("m", **{"backend": "onnx", **config})
        source = ModelSource("m", 1, self.path, self.version, file, complete, InstanceKind.AUTO, None, 1)
        options = compile_options(complete, InstanceKind.AUTO, {Target.REF})
        return plan_programs(source, options, serving_options(complete), _ENVIRONMENT)

    def refusal(self, content: bytes, **config: Any) -> str:
        with pytest.raises(ServeError) as error:
            self.plan(content, **config)
        assert error.value.code is StatusCode.INVALID_ARGUMENT
        return error.value.text


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "m")


def _image(*shape: int | str, name: str = "image", **more: tuple[int | str, ...]) -> bytes:
    """A model that adds its inputs, of these shapes."""
    inputs = {name: shape, **more}
    nodes = [helper.make_node("Sum", list(inputs), ["y"])]
    values = [helper.make_tensor_value_info(key, TensorProto.FLOAT, dims) for key, dims in inputs.items()]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)
    return bytes(helper.make_model(helper.make_graph(nodes, "g", values, [output])).SerializeToString())


def _shapes(plan: ProgramPlan) -> list[Mapping[str, tuple[int, ...]]]:
    return [recipe.input_shapes for recipe in plan.recipes]


def _config(dims: tuple[int, ...], reshape: tuple[int, ...] | None = None) -> dict[str, Any]:
    return {
        "inputs": (InputConfig("image", DataType.FP32, dims, reshape),),
        "outputs": (OutputConfig("y", DataType.FP32, dims, reshape),),
    }


def test_a_program_a_batch_size_small_ones_first(folder: Folder) -> None:
    plan = folder.plan(migraphx_models.mini_resnet(), max_batch_size=6)
    assert [recipe.batch_size for recipe in plan.recipes] == [1, 2, 4, 6]
    assert _shapes(plan) == [{"image": (size, 3, 8, 8)} for size in (1, 2, 4, 6)]
    assert not any(recipe.rebatched for recipe in plan.recipes)
    assert plan.batches
    assert plan.inputs == (GraphTensor("image", DataType.FP32, ("", 3, 8, 8)),)
    assert plan.outputs == (GraphTensor("logits", DataType.FP32, ("", 10)),)
    assert plan.recipes[0].source.digest == file_digest(folder.version / "model.onnx")
    assert plan.recipes[0].source.kind is SourceKind.ONNX
    assert plan.recipes[0].environment == _ENVIRONMENT
    assert plan.weight_bytes > 0


def test_the_sizes_that_are_asked_for(folder: Folder) -> None:
    plan = folder.plan(migraphx_models.mlp(), max_batch_size=8, parameters={"batch": "8"})
    assert [recipe.batch_size for recipe in plan.recipes] == [8]


def test_sizes_without_a_max_batch_size_are_for_a_model_with_a_batch(folder: Folder) -> None:
    sizes = {"parameters": {"batch_sizes": "1,8"}}
    assert [recipe.batch_size for recipe in folder.plan(migraphx_models.mlp(), **sizes).recipes] == [1, 8]
    assert folder.refusal(migraphx_models.mlp(3), **sizes) == (
        "model 'm': parameter 'batch_sizes' or 'batch' without max_batch_size is for a model whose inputs and outputs"
        " all leave their first dimension open, which is the batch; model.onnx takes x [3, 16] and gives scores [3,"
        " 10]. Leave the parameter out, or set max_batch_size if the first dimension is the batch"
    )


def test_a_configuration_without_tensors_gets_a_batch_where_the_model_has_one(folder: Folder) -> None:
    assert [recipe.batch_size for recipe in folder.plan(migraphx_models.mlp()).recipes] == [1, 2, 4]
    fixed = folder.plan(migraphx_models.mlp(3))
    assert not fixed.batches
    assert _shapes(fixed) == [{"x": (3, 16)}]
    assert fixed.inputs[0].shape == (3, 16) and fixed.outputs[0].shape == (3, 10)


def test_a_batch_that_is_baked_in(folder: Folder) -> None:
    plan = folder.plan(migraphx_models.two_in_two_out(2), max_batch_size=4)
    assert [(recipe.batch_size, recipe.rebatched) for recipe in plan.recipes] == [(1, True), (2, False), (4, True)]
    assert plan.inputs[1].shape == (-1, 4) and plan.outputs[1].shape == (-1, 6)


@pytest.mark.parametrize("count", [20, 2000])
def test_tensors_of_a_shape_that_no_memory_holds(folder: Folder, count: int) -> None:
    refused = "model 'm': the shape of tensor 'image' exceeds any memory"
    assert folder.refusal(_image(*[1 << 62] * count)) == refused
    beyond = _image(*"abcdef"), _config((1 << 10,) * 6)
    assert folder.refusal(beyond[0], **beyond[1]) == refused
    small = helper.make_tensor_value_info("image", TensorProto.FLOAT, [1])
    large = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1 << 62] * count)
    graph = helper.make_graph([helper.make_node("Identity", ["image"], ["y"])], "g", [small], [large])
    refused = "model 'm': the shape of tensor 'y' exceeds any memory"
    assert folder.refusal(helper.make_model(graph).SerializeToString()) == refused


@pytest.mark.parametrize(
    ("content", "shapes"),
    [
        (_image(2, 4, mask=(3, 4)), {"image": (2, 4), "mask": (3, 4)}),
        (_image("n", 4, mask=(1, 4)), {"image": (5, 4), "mask": (1, 4)}),
        (_image(name="image"), {"image": ()}),
    ],
)
def test_models_whose_tensors_share_no_first_dimension_do_not_batch(
    folder: Folder, content: bytes, shapes: dict[str, tuple[int, ...]]
) -> None:
    given = "image: 5x4" if shapes["image"] == (5, 4) else ""
    plan = folder.plan(content, max_batch_size=4, parameters={"input_shapes": given})
    assert not plan.batches
    assert [(recipe.batch_size, recipe.input_shapes) for recipe in plan.recipes] == [(0, shapes)]


class TestOpenDimensions:
    def test_by_parameter(self, folder: Folder) -> None:
        plan = folder.plan(
            _image("n", 3, "height", "width"), max_batch_size=2, parameters={"input_shapes": "image: 3x32x48"}
        )
        assert _shapes(plan) == [{"image": (1, 3, 32, 48)}, {"image": (2, 3, 32, 48)}]
        assert plan.inputs[0].shape == (-1, 3, 32, 48)
        assert plan.outputs[0].shape == (-1, 3, -1, -1)

    def test_by_the_configurations_dims(self, folder: Folder) -> None:
        plan = folder.plan(_image("n", 3, "height", "width"), max_batch_size=1, **_config((3, 5, 6)))
        assert _shapes(plan) == [{"image": (1, 3, 5, 6)}]
        reshaped = folder.plan(_image("n", 3, "height", "width"), max_batch_size=1, **_config((90,), (3, 5, 6)))
        assert _shapes(reshaped) == [{"image": (1, 3, 5, 6)}]

    def test_without_a_batch_dimension_all_of_the_shape_is_given(self, folder: Folder) -> None:
        whole = {"parameters": {"input_shapes": "image: 1x3x4x4"}, **_config((-1, 3, -1, -1))}
        assert _shapes(folder.plan(_image("n", 3, "h", "w"), **whole)) == [{"image": (1, 3, 4, 4)}]
        assert _shapes(folder.plan(_image("n", 3), **_config((5, 3)))) == [{"image": (5, 3)}]

    def test_one_name_has_one_number(self, folder: Folder) -> None:
        content = _image("n", "tokens", mask=("n", "tokens"))
        one = folder.plan(content, max_batch_size=1, parameters={"input_shapes": "mask: 7"})
        assert _shapes(one) == [{"image": (1, 7), "mask": (1, 7)}]
        refusal = folder.refusal(content, max_batch_size=1, parameters={"input_shapes": "image: 6; mask: 7"})
        assert "dimension 'tokens' is 6 in one input and 7 in 'mask'" in refusal

    def test_an_input_of_which_nothing_is_known(self, folder: Folder) -> None:
        model = onnx.load_from_string(_image("n", 3))
        model.graph.input[0].type.tensor_type.ClearField("shape")
        content = model.SerializeToString()
        assert "input 'image' has no shape in the model file" in folder.refusal(content, max_batch_size=1)
        given = folder.plan(content, max_batch_size=1, parameters={"input_shapes": "image: 3"})
        assert _shapes(given) == [{"image": (1, 3)}]
        assert _shapes(folder.plan(content, max_batch_size=1, **_config((3,)))) == [{"image": (1, 3)}]

    @pytest.mark.parametrize(
        ("content", "config", "text"),
        [
            (
                _image("n", 3, "height", 5),
                {"max_batch_size": 2},
                "dimension 2 ('height') of input 'image' is left open by the model, and MIGraphX compiles fixed shapes"
                " only: give it a number in the configuration's dims or in parameter 'input_shapes' \"image: 3x?x5\"",
            ),
            (
                _image("n", 3),
                _config((-1, 3)),
                "dimension 0 ('n') of input 'image' is left open by the model, and MIGraphX compiles fixed shapes only:"
                " give it a number in the configuration's dims or in parameter 'input_shapes' \"image: ?x3\"; if it is"
                " the batch, set max_batch_size instead",
            ),
            (
                _image("n", 3),
                {"max_batch_size": 2, "parameters": {"input_shapes": "picture: 3"}},
                "'input_shapes' names 'picture', but the model's inputs are image",
            ),
            (
                _image("n", 3, "h"),
                {"max_batch_size": 2, "parameters": {"input_shapes": "image: 4x4"}},
                "'input_shapes' gives input 'image' [4, 4], but the model has [3, h] (without the batch dimension)",
            ),
            (
                _image("n", 3),
                {"max_batch_size": 2, "parameters": {"input_shapes": "image: 1x3"}},
                "gives input 'image' [1, 3], but the model has [3] (without",
            ),
        ],
    )
    def test_what_is_refused(self, folder: Folder, content: bytes, config: dict[str, Any], text: str) -> None:
        assert text in folder.refusal(content, **config)


def test_external_data_is_part_of_the_model(folder: Folder) -> None:
    model = onnx.load_from_string(migraphx_models.mlp())
    file = folder.version / "model.onnx"
    onnx.save_model(model, file, save_as_external_data=True, size_threshold=0, location="w.bin")
    weights = folder.version / "w.bin"
    plan = folder.plan(file.read_bytes())
    assert plan.recipes[0].source.digest == file_digest(file, [weights])
    changed = bytearray(weights.read_bytes())
    changed[0] ^= 1
    weights.write_bytes(changed)
    assert folder.plan(file.read_bytes()).recipes[0].key != plan.recipes[0].key


def test_the_file_beside_a_compiled_program(folder: Folder) -> None:
    sibling = folder.version / "model.onnx"
    sibling.write_bytes(migraphx_models.mlp())
    config = ModelConfig("m", backend="migraphx", max_batch_size=1)
    file = folder.version / "model.mxr"
    source = ModelSource("m", 1, folder.path, folder.version, file, config, InstanceKind.AUTO, None, 1)
    options = compile_options(config, InstanceKind.AUTO, {Target.REF})
    plan = plan_programs(source, options, serving_options(config), _ENVIRONMENT, model_file=sibling)
    assert plan.recipes[0].source.path == str(sibling)


class TestCalibration:
    def test_the_data_are_part_of_the_recipe(self, folder: Folder) -> None:
        keys = set()
        for value in (1, 2):
            np.savez(folder.path / "samples.npz", x=np.full((2, 16), value, np.float32))
            keys.add(folder.plan(migraphx_models.mlp(), **_INT8).recipes[0].key)
        (folder.path / "pipeline.json").write_text("{}")
        keys.add(folder.plan(migraphx_models.mlp(), **_INT8).recipes[0].key)
        assert len(keys) == 3
        (folder.path / "pipeline.json").rename(folder.path / "other.json")
        elsewhere = {"parameters": {**_INT8["parameters"], "calibration_pipeline": "other.json"}}
        assert folder.plan(migraphx_models.mlp(), **elsewhere).recipes[0].key in keys

    def test_data_that_are_not_there(self, folder: Folder) -> None:
        refusal = folder.refusal(migraphx_models.mlp(), **_INT8)
        assert "calibration_data 'samples.npz' is not in the model's folder" in refusal
        (folder.path / "samples.npz").symlink_to("/etc/hostname")
        assert "leads out of the model's folder" in folder.refusal(migraphx_models.mlp(), **_INT8)
        (folder.path / "samples.npz").unlink()
        (folder.path / "samples.npz").write_bytes(b"1")
        parameters = {**_INT8["parameters"], "calibration_pipeline": "pipe.json"}
        assert "calibration_pipeline 'pipe.json' is not a file in the model's folder" in folder.refusal(
            migraphx_models.mlp(), parameters=parameters
        )


class TestQuantised:
    @pytest.mark.parametrize("precision", ["fp16", "bf16", "int8", "fp8"])
    def test_it_is_not_quantised_again(self, folder: Folder, precision: str) -> None:
        (folder.path / "samples.npz").write_bytes(b"1")
        parameters = {"precision": precision}
        if precision in ("int8", "fp8"):
            parameters["calibration_data"] = "samples.npz"
        refusal = folder.refusal(migraphx_models.quantised(), parameters=parameters)
        assert "model 'm' is quantised already (model.onnx holds quantising operators), so precision" in refusal


def test_an_input_with_a_default_is_a_constant_unless_the_configuration_names_it(folder: Folder) -> None:
    message = onnx.load_from_string(_image(2, 3, bias=(3,)))
    message.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(3, np.float32), "bias"))
    content = message.SerializeToString()
    assert [tensor.name for tensor in folder.plan(content).inputs] == ["image"]
    image, bias = (InputConfig(name, DataType.FP32, dims) for name, dims in (("image", (2, 3)), ("bias", (3,))))
    assert folder.refusal(content, inputs=(image, bias)).startswith(
        "model 'm': input 'bias' has a default in model.onnx, which MIGraphX takes as a constant; leave the input out"
    )


def _encoder_config(sizes: str, max_batch_size: int = 4, **more: str) -> dict[str, Any]:
    dims = (-1,) if max_batch_size else (-1, -1)
    return {
        "max_batch_size": max_batch_size,
        "inputs": tuple(InputConfig(name, DataType.INT64, dims) for name in ("input_ids", "attention_mask")),
        "outputs": (OutputConfig("tokens", DataType.FP32, (*dims, 16)), OutputConfig("pooled", DataType.FP32, (16,))),
        "parameters": {"sizes": sizes, **more},
    }


def _open_image(sizes: str, max_batch_size: int) -> dict[str, Any]:
    dims = (3, -1, -1)
    return {"max_batch_size": max_batch_size, "parameters": {"sizes": sizes}, **_config(dims)}


class TestPaddedDimensions:
    CONTENT = encoder(layers=1).SerializeToString()

    def test_a_program_for_each_batch_size_and_size_the_first_takes_all_requests(self, folder: Folder) -> None:
        plan = folder.plan(self.CONTENT, **_encoder_config("sequence=8,32,16", 2))
        assert [recipe.title for recipe in plan.recipes] == [
            "batch size 1, sequence 32",
            "batch size 1, sequence 8",
            "batch size 1, sequence 16",
            "batch size 2, sequence 8",
            "batch size 2, sequence 16",
            "batch size 2, sequence 32",
        ]
        assert _shapes(plan)[3] == {"input_ids": (2, 8), "attention_mask": (2, 8)}
        assert [tensor.shape for tensor in plan.inputs] == [(-1, -1), (-1, -1)]
        (dimension,) = plan.padding.dimensions
        assert (dimension.inputs, dimension.outputs) == ({"input_ids": (1,), "attention_mask": (1,)}, {"tokens": (1,)})

    def test_dimensions_that_are_padded_together(self, folder: Folder) -> None:
        plan = folder.plan(_image("n", 3, "h", "w"), **_open_image("h=32,64; w=32,48", 1))
        assert [recipe.input_shapes["image"] for recipe in plan.recipes] == [
            (1, 3, 64, 48),
            (1, 3, 32, 32),
            (1, 3, 32, 48),
            (1, 3, 64, 32),
        ]
        assert plan.recipes[1].title == "batch size 1, h 32, w 32"

    def test_the_key_is_that_of_the_same_shapes_without_padding(self, folder: Folder) -> None:
        plan = folder.plan(self.CONTENT, **_encoder_config("sequence=8,16", 1))
        fixed = _encoder_config("", 1)
        fixed["inputs"] = tuple(replace(entry, dims=(16,)) for entry in fixed["inputs"])
        assert folder.plan(self.CONTENT, **fixed).recipes[0].key == plan.recipes[0].key

    def test_the_memory_of_a_program_is_that_at_its_sizes(self, folder: Folder) -> None:
        plan = folder.plan(self.CONTENT, **_encoder_config("sequence=8,16", 2))
        by_title = {recipe.title: planned_memory(recipe, plan).tensor_bytes for recipe in plan.recipes}
        # Two INT64 inputs, tokens of 16 FP32 and the pooled vector, for two rows of 8.
        assert by_title["batch size 2, sequence 8"] == 2 * (8 * 8 * 2 + 8 * 16 * 4 + 16 * 4)

    def test_the_number_of_programs_is_bounded(self, folder: Folder) -> None:
        lengths = ",".join(map(str, range(1, 31)))
        assert folder.refusal(self.CONTENT, **_encoder_config(f"sequence={lengths}", 16)) == (
            "model 'm' would have 150 programs (5 batch sizes x 30 sizes of 'sequence'), and MIGraphX compiles at most"
            " 128 for a model; name fewer in parameter 'batch_sizes' or 'sizes'"
        )

    def test_other_parameters_that_contradict_it(self, folder: Folder) -> None:
        assert "leave 'input_ids' out of 'input_shapes'" in folder.refusal(
            self.CONTENT, **_encoder_config("sequence=8", input_shapes="input_ids: 8")
        )
        assert "parameter 'sizes' does not work with precision \"int8\"" in folder.refusal(
            self.CONTENT, **_encoder_config("sequence=8", **_INT8["parameters"])
        )
        assert "names the dimension 'length', which the model does not have" in folder.refusal(
            self.CONTENT, **_encoder_config("length=8")
        )
