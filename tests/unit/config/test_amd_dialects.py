"""Folders of AMD Inference Server, valid and invalid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.model_folders import Models

from rocserve.amd_inference_server.configurations import is_toml, read_toml
from rocserve.config.definition import FolderReading, complete_definition, find_model_file
from rocserve.config.ensemble_checks import check_ensemble
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.model_config import EnsembleStep, InputConfig, OutputConfig
from rocserve.core.requests import Signature

MakeSignature = Callable[..., Signature]

_PBTXT = """
# comments are fine: input { }
name: "flowers"
platform: "onnx_onnxv1"
inputs [
    {
    name: "pixels"
    datatype: "FP32"
    shape: [3,16,16]
    }
]
outputs [ { name: "scores" datatype: "Fp32" shape: [5] } ]
"""

_TOML = """
name = "flowers"
platform = "onnx_onnxv1"

[[inputs]]
name = "pixels"
datatype = "FP32"
shape = [3, 16, 16]

[[outputs]]
name = "scores"
datatype = "FP32"
shape = [5]
"""

_CHAIN = """
[[models]]
name = "garden"
platform = "rocal_json"
id = "decode.json"

[[models.inputs]]
name = "jpeg"
datatype = "UINT8"
shape = [1048576]
id = ""

[[models.outputs]]
name = "image"
datatype = "FP32"
shape = [3, 16, 16]
id = "decoded"

[[models]]
name = "judge"
platform = "onnx_onnxv1"
id = "flowers.onnx"

[[models.inputs]]
name = "pixels"
datatype = "FP32"
shape = [3, 16, 16]
id = "decoded"

[[models.outputs]]
name = "scores"
datatype = "FP32"
shape = [5]
id = "result"
"""


@pytest.fixture
def flowers(make_signature: MakeSignature) -> Signature:
    return make_signature({"pixels": ("FP32", (-1, 3, 16, 16))}, {"scores": ("FP32", (-1, 5))})


@pytest.mark.parametrize(
    ("filename", "text"), [("config.pbtxt", _PBTXT), ("config.toml", _TOML), ("any name.toml", _TOML)]
)
def test_one_model(models: Models, flowers: Signature, filename: str, text: str) -> None:
    folder = models.folder("flowers", {filename: text, "1/flowers-v2.onnx": ""})
    definition = models.read(folder)
    assert definition.is_amd
    assert find_model_file(definition, folder / "1").name == "flowers-v2.onnx"
    complete = complete_definition(definition, flowers)
    assert complete.warnings == ()
    assert complete.config.backend == "onnx"
    assert complete.config.max_batch_size == 64
    assert complete.config.inputs == (InputConfig("pixels", DataType.FP32, (3, 16, 16)),)
    assert complete.config.outputs == (OutputConfig("scores", DataType.FP32, (5,)),)
    assert complete.config.dynamic_batching is not None


def test_toml_goes_before_their_pbtxt(models: Models) -> None:
    folder = models.folder("flowers", {"config.toml": _TOML, "config.pbtxt": _PBTXT, "1/a.onnx": ""})
    assert models.read(folder).source == "config.toml"


def test_the_models_own_tensors_are_taken_where_they_differ(models: Models, make_signature: MakeSignature) -> None:
    folder = models.folder("flowers", {"config.toml": _TOML.replace("[3, 16, 16]", "[16, 16, 3]"), "1/a.onnx": ""})
    signature = make_signature({"data": ("FP32", (-1, 3, 16, 16))}, {"scores": ("FP32", (-1, 5))})
    complete = complete_definition(models.read(folder), signature)
    assert complete.config.inputs == (InputConfig("data", DataType.FP32, (3, 16, 16)),)
    assert complete.warnings == (
        "model 'flowers': the inputs of the configuration differ from the model's, which are used: data",
    )


def test_outputs_may_be_left_out_but_not_inputs(models: Models, make_signature: MakeSignature) -> None:
    folder = models.folder("flowers", {"config.toml": _TOML, "1/a.onnx": ""})
    signature = make_signature(
        {"pixels": ("FP32", (-1, 3, 16, 16)), "mask": ("BOOL", (-1, 16))},
        {"scores": ("FP32", (-1, 5)), "features": ("FP32", (-1, 9))},
    )
    complete = complete_definition(models.read(folder), signature)
    assert [tensor.name for tensor in complete.config.inputs] == ["pixels", "mask"]
    assert [tensor.name for tensor in complete.config.outputs] == ["scores"]
    assert len(complete.warnings) == 1


def test_a_model_that_cannot_batch(models: Models, make_signature: MakeSignature) -> None:
    folder = models.folder("flowers", {"config.toml": _TOML, "1/a.onnx": ""})
    signature = make_signature({"pixels": ("FP32", (1, 3, 16, 16))}, {"scores": ("FP32", (1, 5))})
    config = complete_definition(models.read(folder), signature).config
    assert config.max_batch_size == 0
    assert config.dynamic_batching is None
    assert config.inputs[0].dims == (1, 3, 16, 16)


@pytest.mark.parametrize(
    ("parameter", "size"), [("", 0), ('parameters { key: "batch" value { string_param: "8" } }', 8)]
)
def test_dependent_rows_are_joined_only_where_batch_is_written(
    models: Models, make_signature: MakeSignature, parameter: str, size: int
) -> None:
    folder = models.folder("flowers", {"config.pbtxt": f"{_PBTXT} {parameter}", "1/a.onnx": ""})
    signature = make_signature({"pixels": ("FP32", (-1, 3, 16, 16))}, {"scores": ("FP32", (-1, 5))})
    complete = complete_definition(models.read(folder), replace(signature, dependent_rows="rows depend on each other"))
    assert complete.config.max_batch_size == size
    assert any("requests run one by one (rows depend on each other)" in one for one in complete.warnings) is (size == 0)


def test_strict_compares_instead_of_taking(models: Models, make_signature: MakeSignature) -> None:
    folder = models.folder("flowers", {"config.toml": _TOML, "1/a.onnx": ""})
    signature = make_signature({"data": ("FP32", (-1, 3, 16, 16))}, {"scores": ("FP32", (-1, 5))})
    with pytest.raises(ServeError, match="unexpected inference input 'pixels', allowed inputs are: data"):
        complete_definition(models.read(folder), signature, strict=True)


@pytest.mark.parametrize(("parameter", "batch"), [("int64_param: 16", 16), ('string_param: "8"', 8)])
def test_parameters(models: Models, parameter: str, batch: int) -> None:
    text = f"""{_PBTXT}
    parameters {{ key: "batch" value {{ {parameter} }} }}
    parameters {{ key: "fast" value {{ bool_param: true }} }}
    """
    definition = models.made("flowers", {"config.pbtxt": text, "1/a.onnx": ""})
    assert definition.config.max_batch_size == batch
    assert definition.config.parameters == {"batch": str(batch), "fast": "true"}


@pytest.mark.parametrize("batch", ["0", "2147483648", "4.0", "²", "9" * 5000])
def test_batch_that_cannot_be(models: Models, batch: str) -> None:
    text = f'{_PBTXT} parameters {{ key: "batch" value {{ string_param: "{batch}" }} }}'
    folder = models.folder("flowers", {"config.pbtxt": text, "1/a.onnx": ""})
    expected = f"config.pbtxt: parameter 'batch' must be a positive integer, got '{batch}'"
    assert models.fault(folder) == expected


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ('datatype: "FP32"', 'datatyp: "FP32"', "config.pbtxt:8:5: unknown field 'datatyp' of TensorMetadata; did you"),
        ('datatype: "FP32"', 'datatype: "FP33"', "config.pbtxt: inputs 'pixels': unknown datatype 'FP33'; expected"),
        ('platform: "onnx_onnxv1"', "", "config.pbtxt: the configuration must have 'platform'"),
        ('"flowers"', '"roses"', "unexpected directory name 'flowers' for model 'roses', directory name must equal"),
        ('"onnx_onnxv1"', '"vitis_xmodel"', "unexpected platform type 'vitis_xmodel' for flowers; such models run on"),
        ("[3,16,16]", "[3,0]", "model input 'pixels' dimension must be integer >= 1, or -1 to indicate"),
    ],
)
def test_faults_of_their_pbtxt(models: Models, old: str, new: str, fault: str) -> None:
    assert old in _PBTXT
    folder = models.folder("flowers", {"config.pbtxt": _PBTXT.replace(old, new), "1/a.onnx": ""})
    assert models.fault(folder).startswith(fault)


def test_slip_in_a_triton_file_is_not_taken_for_their_dialect(models: Models) -> None:
    text = 'backend: "onnxruntime" max_batch_size: 4\ninputs { name: "x" data_type: TYPE_FP32 dims: 1 }'
    assert models.fault_of("m", {"config.pbtxt": text}) == (
        "config.pbtxt:2:1: unknown field 'inputs' of ModelConfig; did you mean 'input'?"
    )


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ('platform = "onnx_onnxv1"', "platform = 3", "config.toml: 'platform' must be a string that is not empty, got"),
        ('platform = "onnx_onnxv1"', "", "config.toml: the configuration must have 'platform', a string"),
        ("shape = [5]", "shape = [5.0]", "config.toml: outputs[0]: 'shape' must be an array of integers, got [5.0]"),
        ("shape = [5]", "", "config.toml: outputs[0]: the configuration must have 'shape', an array of integers"),
        ("[[outputs]]", "[outputs]", "config.toml: 'outputs' must be an array of tables ([[outputs]]) with at least"),
        ('name = "flowers"', "name = flowers", "config.toml:2:8: invalid value"),
        ("[5]", "[5", "config.toml:"),
    ],
)
def test_faults_of_toml(models: Models, old: str, new: str, fault: str) -> None:
    assert old in _TOML
    folder = models.folder("flowers", {"config.toml": _TOML.replace(old, new), "1/a.onnx": ""})
    assert models.fault(folder).startswith(fault)


def test_warnings_name_keys_without_meaning(models: Models) -> None:
    text = _TOML.replace("shape = [5]", 'shape = [5]\nlayout = "N"')
    folder = models.folder("flowers", {"config.toml": "max_batch_size = 3\n" + text, "1/a.onnx": ""})
    assert models.read(folder).warnings == (
        "config.toml: keys without effect: max_batch_size",
        "config.toml: outputs[0]: keys without effect: layout",
    )


class TestChain:
    @pytest.fixture
    def decoder(self, make_signature: MakeSignature) -> Signature:
        return make_signature({"jpeg": ("UINT8", (-1, -1))}, {"image": ("FP32", (-1, 3, 16, 16))})

    def test_becomes_an_ensemble_and_its_members(self, models: Models, decoder: Signature, flowers: Signature) -> None:
        folder = models.folder("garden", {"config.toml": _CHAIN, "1/decode.json": "", "1/flowers.onnx": ""})
        ensemble, first, second = FolderReading(folder, models.registry).definitions()
        assert [ensemble.name, first.name, second.name] == ["garden", "garden_decode", "garden_flowers"]
        assert ensemble.is_ensemble
        assert ensemble.config.inputs == (InputConfig("jpeg", DataType.UINT8, (1048576,)),)
        assert ensemble.config.outputs == (OutputConfig("scores", DataType.FP32, (5,)),)
        assert ensemble.config.ensemble_steps == (
            EnsembleStep("garden_decode", -1, {"jpeg": "jpeg"}, {"image": "id:decoded"}),
            EnsembleStep("garden_flowers", -1, {"pixels": "id:decoded"}, {"scores": "scores"}),
        )
        assert first.config.backend == "rocal"
        assert find_model_file(first, folder / "1").name == "decode.json"
        assert find_model_file(second, folder / "1").name == "flowers.onnx"
        complete = (complete_definition(first, decoder), complete_definition(second, flowers))
        check_ensemble(complete_definition(ensemble, None).config, {member.name: member.config for member in complete})

    def test_recorded_answers_are_those_of_the_chain(self, models: Models) -> None:
        files = {"config.toml": _CHAIN, "1/decode.json": "", "1/flowers.onnx": "", "1/check.npz": ""}
        ensemble, *members = models.all("garden", files)
        version = ensemble.folder / "1"
        assert ensemble.recorded_answers(version) == version / "check.npz"
        assert [member.recorded_answers(version) for member in members] == [None, None]

    def test_of_one_stage_is_a_model(self, models: Models) -> None:
        text = _CHAIN[: _CHAIN.index("[[models]]", 20)]
        definition = models.made("garden", {"config.toml": text, "1/decode.json": ""})
        assert not definition.is_ensemble
        assert definition.config.default_model_filename == "decode.json"

    def test_side_ends_belong_to_the_client(self, models: Models) -> None:
        text = _CHAIN + '\n[[models.outputs]]\nname = "features"\ndatatype = "FP16"\nshape = [9]\n'
        ensemble, *_ = models.all("garden", {"config.toml": text})
        assert [output.name for output in ensemble.config.outputs] == ["scores", "features"]

    def test_output_named_as_an_input_goes_by_its_id(self, models: Models) -> None:
        text = _CHAIN.replace('"scores"', '"jpeg"')
        ensemble, *_ = models.all("garden", {"config.toml": text})
        assert ensemble.config.outputs[0].name == "result"
        assert ensemble.config.ensemble_steps[1].output_map == {"jpeg": "result"}

    def test_stages_may_share_a_file(self, models: Models) -> None:
        text = _CHAIN.replace("flowers.onnx", "decode.json").replace("onnx_onnxv1", "rocal_json")
        names = [definition.name for definition in models.all("garden", {"a.toml": text})]
        assert names == ["garden", "garden_decode_0", "garden_decode_1"]

    @pytest.mark.parametrize(
        ("old", "new", "fault"),
        [
            (
                'shape = [3, 16, 16]\nid = "decoded"\n\n[[models.outputs]]',
                'shape = [3, 16, 16]\nid = "decodet"\n\n[[models.outputs]]',
                "config.toml: models[1] ('judge'): input 'pixels' has id 'decodet', which no output has; ids of"
                " outputs: decoded, result",
            ),
            ('"result"', '"decoded"', "config.toml: 2 outputs have the id 'decoded'; each id may occur once"),
            ('id = "flowers.onnx"', "", "config.toml: models[1]: the configuration must have 'id', a string that is"),
            ('name = "garden"', 'name = "yard"', "unexpected directory name 'garden' for model 'yard', directory name"),
            ('"onnx_onnxv1"', '"amdinfer_cpp"', "unexpected platform type 'amdinfer_cpp' for garden_flowers; it is a"),
            (
                'name = "scores"\ndatatype = "FP32"\nshape = [5]\nid = "result"',
                'name = "jpeg"\ndatatype = "FP32"\nshape = [5]\nid = ""',
                "config.toml: models[1] ('judge'): output 'jpeg' has the name of an input of the chain; give it an id",
            ),
            ('id = ""', 'id = "result"', "config.toml: every input is linked to another stage; leave one with an"),
        ],
    )
    def test_faults(self, models: Models, old: str, new: str, fault: str) -> None:
        assert old in _CHAIN
        folder = models.folder("garden", {"config.toml": _CHAIN.replace(old, new), "1/decode.json": ""})
        assert models.fault(folder).startswith(fault)


@pytest.mark.parametrize(
    "text",
    [
        ".".join("a" * 50_000) + " = 1",
        f"x = {{ {'.'.join('a' * 5_000)} = 1 }}",
        f"x = {'9' * 5_000}",
        "a = 1\n" * 20_000,
    ],
    ids=["a key", "a key within", "a number", "lines"],
)
def test_toml_that_would_take_long_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    assert not is_toml(file)
    with pytest.raises(ServeError, match="expected at most 65536 characters, in lines of at most 2048"):
        read_toml(file, "m")


def test_a_size_beyond_64_bits_is_no_integer(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    tensor = "name = 't'\ndatatype = 'FP32'\nshape = "
    file.write_text(
        f"name = 'm'\nplatform = 'onnx_onnxv1'\n[[inputs]]\n{tensor}[{1 << 63}]\n[[outputs]]\n{tensor}[1]\n"
    )
    with pytest.raises(ServeError, match=r"'shape' must be an array of integers, got \[9223372036854775808\]"):
        read_toml(file, "m")
