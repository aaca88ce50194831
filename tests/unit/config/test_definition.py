from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.model_folders import Models

from rocserve.config.definition import ModelDefinition, complete_definition, find_model_file
from rocserve.config.model_folder import FlatModel
from rocserve.config.request_rules import ConfigRequest
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import ExecutionAccelerator
from rocserve.core.requests import Signature

MakeSignature = Callable[..., Signature]
_ONNX = 'backend: "onnxruntime"'


def test_folder_without_a_configuration(models: Models) -> None:
    definition = models.made("m", {"1/model.onnx": ""})
    assert definition.name == "m"
    assert definition.backend is not None
    assert definition.backend.name == "onnx"
    assert (definition.message.platform, definition.message.backend) == ("onnx_onnxv1", "onnx")
    assert definition.config.default_model_filename == "model.onnx"
    assert definition.source == "no configuration file"


def test_strict_needs_a_configuration(models: Models) -> None:
    fault = models.fault_of("m", {"1/model.onnx": ""}, strict=True)
    assert fault.startswith("failed to open text file for read ")
    assert "config.pbtxt: No such file or directory" in fault


def test_strict_needs_a_platform(models: Models) -> None:
    folder = models.folder("m", {"config.pbtxt": "max_batch_size: 2", "1/model.onnx": ""})
    assert models.fault(folder, strict=True) == "must specify 'platform' or 'backend' for 'm'"
    assert models.read(folder).config.backend == "onnx"


def test_name_must_be_the_folders(models: Models) -> None:
    folder = models.folder("m", {"config.pbtxt": f'name: "n" {_ONNX}'})
    assert models.fault(folder) == ("unexpected directory name 'm' for model 'n', directory name must equal model name")
    assert models.read(folder, name="n").name == "n"


def test_fault_in_the_file_tells_its_place(models: Models) -> None:
    folder = models.folder("m", {"config.pbtxt": "\n  max_batch_sise: 1"})
    assert models.fault(folder).startswith("config.pbtxt:2:3: unknown field 'max_batch_sise'")


def test_a_fault_is_found_however_many_empty_lines_follow(models: Models) -> None:
    folder = models.folder("m", {"config.pbtxt": "bogus" + "\n" * 1_000_000})
    assert "unknown field 'bogus'" in models.fault(folder)


def test_chosen_configuration(models: Models) -> None:
    folder = models.folder(
        "m",
        {
            "config.pbtxt": f"{_ONNX} max_batch_size: 1",
            "configs/large.pbtxt": f"{_ONNX} max_batch_size: 64",
            "1/model.onnx": "",
        },
    )
    assert models.read(folder, config_name="large").config.max_batch_size == 64
    assert models.read(folder, config_name="absent").config.max_batch_size == 1
    assert "must be a path within" in models.fault(folder, config_name="../../secret")


def test_override_replaces_the_file(models: Models) -> None:
    folder = models.folder("m", {"config.pbtxt": "not a configuration", "1/model.onnx": ""})
    override = '{"backend": "onnxruntime", "max_batch_size": 3}'
    assert models.read(folder, request=ConfigRequest(override)).config.max_batch_size == 3
    assert models.fault(folder, request=ConfigRequest("{")).startswith("Invalid config override: ")
    assert models.fault(folder, request=ConfigRequest('{"name": "n"}')).startswith("unexpected directory name 'm'")


def test_unsupported_settings_are_refused_at_once(models: Models) -> None:
    folder = models.folder("m", {"config.pbtxt": f"{_ONNX} model_transaction_policy {{ decoupled: true }}"})
    with pytest.raises(ServeError) as raised:
        models.read(folder)
    assert raised.value.code is StatusCode.UNIMPLEMENTED


def test_amds_triton_port(models: Models) -> None:
    text = """
    name: "resnet" backend: "onnxruntime"
    optimization { execution_accelerators { gpu_execution_accelerator {
      name: "migraphx" parameters { key: "migraphx_max_dynamic_batch" value: "8" } } } }
    """
    folder = models.folder("resnet", {"config.pbtxt": text, "0/model.onnx": ""})
    definition = models.read(folder)
    assert definition.warnings == ()
    assert definition.config.gpu_accelerators == (
        ExecutionAccelerator("migraphx", {"migraphx_max_dynamic_batch": "8"}),
    )
    assert find_model_file(definition, folder / "0") == folder / "0" / "model.onnx"


@pytest.mark.parametrize("broken", ["[[models]", 'name = "m"\nplatform = ', "tool = { a = 1 }"])
def test_foreign_toml_is_left_alone(models: Models, broken: str) -> None:
    folder = models.folder("m", {"pyproject.toml": broken, "1/model.py": ""})
    assert not models.read(folder).is_amd


def test_pbtxt_of_another_name(models: Models) -> None:
    folder = models.folder("m", {"my.pbtxt": _ONNX, "1/model.onnx": ""})
    assert models.read(folder).source == "my.pbtxt"
    (folder / "other.pbtxt").write_text(_ONNX)
    assert models.fault(folder) == (
        "model 'm' has several configuration files: my.pbtxt, other.pbtxt; name the right one config.pbtxt"
    )


@pytest.mark.parametrize("name", ["config.pbtx", "config.pbtxt.txt", "config.txt", "Config.pbtxt"])
def test_a_misspelt_name_of_the_configuration_is_reported(models: Models, name: str) -> None:
    folder = models.folder("m", {name: _ONNX, "config.json": "{}", "1/model.onnx": ""})
    expected = () if name == "Config.pbtxt" else (f"'{name}' is not read: the configuration's name is config.pbtxt",)
    assert models.read(folder).warnings == expected


def test_triton_configuration_wins_over_toml(models: Models) -> None:
    folder = models.folder("m", {"config.pbtxt": _ONNX, "config.toml": "not = [toml", "1/model.onnx": ""})
    assert models.read(folder).source == "config.pbtxt"


class TestEnsemble:
    _TEXT = """
    platform: "ensemble" max_batch_size: 4
    input { name: "in" data_type: TYPE_FP32 dims: 2 }
    output { name: "out" data_type: TYPE_FP32 dims: 2 label_filename: "labels.txt" }
    ensemble_scheduling { step {
      model_name: "a" model_version: -1
      input_map { key: "x" value: "in" } output_map { key: "y" value: "out" } } }
    """

    def test_needs_no_model(self, models: Models) -> None:
        folder = models.folder("e", {"config.pbtxt": self._TEXT, "labels.txt": "a\nb\n"})
        definition = models.read(folder)
        assert definition.is_ensemble
        assert definition.config.backend == "ensemble"
        complete = complete_definition(definition, None)
        assert complete.config.outputs[0].labels == ("a", "b")
        assert find_model_file(complete, folder / "1") == folder / "1"

    def test_needs_its_tensors(self, models: Models) -> None:
        start = self._TEXT.index("ensemble_scheduling")
        folder = models.folder("e", {"config.pbtxt": 'platform: "ensemble" ' + self._TEXT[start:]})
        assert models.fault(folder) == "ensemble tensor 'out' is unused in ensemble 'e'"


class TestModelFile:
    def test_alone(self, models: Models) -> None:
        folder = models.folder("m", {"config.pbtxt": _ONNX, "1/model.onnx": ""})
        assert find_model_file(models.read(folder), folder / "1") == folder / "1" / "model.onnx"

    def test_given_name(self, models: Models) -> None:
        text = f'{_ONNX} default_model_filename: "sub/net.onnx"'
        folder = models.folder("m", {"config.pbtxt": text, "1/sub/net.onnx": "", "1/model.onnx": ""})
        assert find_model_file(models.read(folder), folder / "1") == folder / "1" / "sub" / "net.onnx"

    def test_missing(self, models: Models) -> None:
        folder = models.folder("m", {"config.pbtxt": _ONNX, "1/resnet.onnx": "", "1/a.txt": ""})
        with pytest.raises(ServeError) as raised:
            find_model_file(models.read(folder), folder / "1")
        assert raised.value.text == (
            "unable to find the model file of 'm' in version folder 1: expected model.onnx, found a.txt,"
            " resnet.onnx. Rename the file, set default_model_filename, or set the backend that reads it"
        )

    def test_versions_may_hold_different_names(self, models: Models) -> None:
        folder = models.folder("m", {"config.pbtxt": 'backend: "rocal"', "1/model.json": "", "2/mine.json": ""})
        definition = models.read(folder)
        assert definition.config.default_model_filename == "mine.json"
        assert find_model_file(definition, folder / "1").name == "model.json"
        assert find_model_file(definition, folder / "2").name == "mine.json"

    def test_several_files_fit_a_pattern(self, models: Models) -> None:
        folder = models.folder(
            "m", {"config.pbtxt": 'backend: "rocal"', "1/a.json": "", "1/b.json": "", "1/.c.json": ""}
        )
        with pytest.raises(ServeError, match=r"json, found 2 that match: a\.json, b\.json\. Rename"):
            find_model_file(models.read(folder), folder / "1")

    def test_no_way_out_of_the_repository(self, models: Models, tmp_path: Path) -> None:
        (tmp_path / "secret.onnx").write_text("")
        folder = models.folder("m", {"config.pbtxt": _ONNX, "1/other": ""})
        (folder / "1" / "model.onnx").symlink_to(tmp_path / "secret.onnx")
        with pytest.raises(ServeError, match=r"model file of 'm' 'model\.onnx' is a link that leads out of the model"):
            find_model_file(models.read(folder), folder / "1")

    def test_links_within_the_repository(self, models: Models) -> None:
        other = models.folder("other", {"1/model.onnx": ""})
        folder = models.folder("m", {"config.pbtxt": _ONNX, "1/keep": ""})
        (folder / "1" / "model.onnx").symlink_to(other / "1" / "model.onnx")
        definition = models.read(folder, repository=folder.parent)
        assert find_model_file(definition, folder / "1") == folder / "1" / "model.onnx"
        with pytest.raises(ServeError, match="leads out of the"):
            find_model_file(models.read(folder), folder / "1")

    @pytest.mark.parametrize("name", ["../2/model.onnx", "/etc/passwd"])
    def test_names_that_leave_the_folder(self, models: Models, name: str) -> None:
        folder = models.folder("m", {"config.pbtxt": f'{_ONNX} default_model_filename: "{name}"', "2/model.onnx": ""})
        (folder / "1").mkdir()
        with pytest.raises(ServeError, match="must be a path within the folder 1, without"):
            find_model_file(models.read(folder), folder / "1")


class TestLabels:
    def _text(self, filename: str) -> str:
        output = f'output {{ name: "y" data_type: TYPE_FP32 dims: 3 label_filename: "{filename}" }}'
        return f"{_ONNX} max_batch_size: 2 {output}"

    def test_lines(self, models: Models, make_signature: MakeSignature) -> None:
        folder = models.folder("m", {"config.pbtxt": self._text("a/l.txt"), "a/l.txt": "cat\r\n\nüber hund"})
        definition = models.read(folder)
        assert definition.config.outputs[0].labels == ("cat", "", "über hund")
        signature = make_signature({"x": ("FP32", (-1, 1))}, {"y": ("FP32", (-1, 3))})
        assert complete_definition(definition, signature).config.outputs[0].labels == ("cat", "", "über hund")

    def test_missing(self, models: Models) -> None:
        fault = models.fault_of("m", {"config.pbtxt": self._text("l.txt")})
        assert fault.startswith("failed to open text file for read ")
        assert fault.endswith("(label file of output 'y'; put it in the model's folder)")

    @pytest.mark.parametrize("name", ["../l.txt", "/etc/hostname"])
    def test_outside(self, models: Models, name: str) -> None:
        fault = models.fault_of("m", {"config.pbtxt": self._text(name)})
        assert fault == (
            f"label file of output 'y' '{name}' must be a path within the folder m, without '..' and not absolute"
        )

    @pytest.mark.parametrize(
        "field",
        [
            'output { name: "y" data_type: TYPE_FP32 dims: 3 label_filename: "a\\000b" }',
            'model_repository_agents { agents { name: "checksum" parameters { key: "MD5:a\\000b" value: "d" } } }',
            'input { name: "x" data_type: TYPE_FP32 dims: 3 } model_warmup { name: "w" batch_size: 1 inputs { key: "x"'
            ' value { data_type: TYPE_FP32 dims: 3 input_data_file: "a\\000b" } } }',
        ],
    )
    def test_no_path_has_a_zero_byte(self, models: Models, field: str) -> None:
        fault = models.fault_of("m", {"config.pbtxt": f"{_ONNX} {field}"})
        assert "'a\\x00b' must be a path within the folder" in fault

    def test_link_to_the_outside(self, models: Models, tmp_path: Path) -> None:
        (tmp_path / "secret").write_text("s")
        folder = models.folder("m", {"config.pbtxt": self._text("l.txt")})
        (folder / "l.txt").symlink_to(tmp_path / "secret")
        assert "is a link that leads out of the model repository" in models.fault(folder)

    def test_link_within_as_a_mounted_config_map_has(self, models: Models) -> None:
        folder = models.folder("m", {"config.pbtxt": self._text("l.txt"), "..data/l.txt": "a"})
        (folder / "l.txt").symlink_to("..data/l.txt")
        assert models.read(folder).config.outputs[0].labels == ("a",)


class TestWarmup:
    def _text(self, sample: str) -> str:
        return f'{_ONNX} max_batch_size: 2 model_warmup {{ name: "w" {sample} }}'

    @pytest.fixture
    def signature(self, make_signature: MakeSignature) -> Signature:
        return make_signature({"x": ("FP32", (-1, 1))}, {"y": ("FP32", (-1, 3))})

    @pytest.mark.parametrize(
        ("tensor", "fault"),
        [
            ("dims: 1 zero_data: true", "[request id: <id_unknown>] inference input 'x' of model 'm' has no data-type"),
            (
                "data_type: TYPE_FP32 dims: -1 zero_data: true",
                "warmup setting expects all variable-size dimensions are specified for input 'x'",
            ),
            (
                "data_type: TYPE_FP32 dims: 1",
                "[request id: <id_unknown>] warmup setting expects input 'x' to have input_data_type set",
            ),
        ],
    )
    def test_samples_when_read(self, models: Models, tensor: str, fault: str) -> None:
        text = self._text(f'batch_size: 1 inputs {{ key: "x" value {{ {tensor} }} }}')
        assert models.fault_of("m", {"config.pbtxt": text}) == f"{fault} (warm-up sample 'w')"

    def test_files(self, models: Models) -> None:
        tensor = 'data_type: TYPE_FP32 dims: 1 input_data_file: "raw"'
        text = self._text(f'batch_size: 1 inputs {{ key: "x" value {{ {tensor} }} }}')
        folder = models.folder("m", {"config.pbtxt": text})
        missing = folder / "warmup" / "raw"
        assert models.fault(folder) == (
            f"failed to open text file for read {missing}: No such file or directory (warm-up sample 'w')"
        )
        (folder / "warmup").mkdir()
        (folder / "warmup" / "raw").write_bytes(b"\0\0\0\0")
        assert models.read(folder).config.model_warmup[0].inputs["x"].source == "file:raw"

    @pytest.mark.parametrize(
        ("sample", "fault"),
        [
            (
                'batch_size: 3 inputs { key: "x" value { data_type: TYPE_FP32 dims: 1 zero_data: true } }',
                "failed to run warmup sample 'w': batch size 3 for 'm', max allowed is 2",
            ),
            (
                'batch_size: 1 inputs { key: "v" value { data_type: TYPE_FP32 dims: 1 zero_data: true } }',
                "unexpected inference input 'v' for model 'm'; its inputs are: x (warm-up sample 'w')",
            ),
            (
                'batch_size: 1 inputs { key: "x" value { data_type: TYPE_INT8 dims: 1 zero_data: true } }',
                "[request id: <id_unknown>] inference input 'x' data-type is 'INT8', but model 'm' expects 'FP32'"
                " (warm-up sample 'w')",
            ),
            (
                "batch_size: 1",
                "[request id: <id_unknown>] expected 1 inputs but got 0 inputs for model 'm'. Got input(s) [], but"
                " missing required input(s) ['x']. Please provide all required input(s). (warm-up sample 'w')",
            ),
            (
                'batch_size: 1 inputs { key: "x" value { data_type: TYPE_FP32 dims: 2 zero_data: true } }',
                "[request id: <id_unknown>] unexpected shape for input 'x' for model 'm'. Expected [-1,1], got [1,2]."
                " NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be"
                " prepended to each input shape. If you want to specify the full shape including the batch dim in your"
                " input dims config, try setting max_batch_size to zero. See the model configuration docs for more info"
                " on max_batch_size. (warm-up sample 'w')",
            ),
        ],
    )
    def test_samples_against_the_model(self, models: Models, signature: Signature, sample: str, fault: str) -> None:
        definition = models.made("m", {"config.pbtxt": self._text(sample)})
        with pytest.raises(ServeError) as raised:
            complete_definition(definition, signature)
        assert raised.value.text == fault


class TestFilesByArchitecture:
    def _definition(self, models: Models) -> tuple[ModelDefinition, Path]:
        text = f'{_ONNX} cc_model_filenames {{ key: "gfx90a" value: "fast.onnx" }}'
        folder = models.folder("m", {"config.pbtxt": text, "1/model.onnx": "", "1/fast.onnx": ""})
        return models.read(folder), folder / "1"

    @pytest.mark.parametrize(
        ("architecture", "file"),
        [
            ("gfx90a", "fast.onnx"),
            ("gfx90a:sramecc+:xnack-", "fast.onnx"),
            ("gfx942", "model.onnx"),
            ("", "model.onnx"),
        ],
    )
    def test_choice(self, models: Models, architecture: str, file: str) -> None:
        definition, folder = self._definition(models)
        assert find_model_file(definition, folder, architecture) == folder / file

    def test_the_file_is_missing(self, models: Models) -> None:
        definition, folder = self._definition(models)
        (folder / "fast.onnx").unlink()
        with pytest.raises(ServeError, match=r"expected fast\.onnx, found model\.onnx"):
            find_model_file(definition, folder, "gfx90a")


def test_a_versions_own_recorded_answers_come_before_the_models(models: Models) -> None:
    definition = models.made("m", {"1/model.onnx": "", "2/model.onnx": "", "check.npz": "", "2/check.npz": ""})
    folder = definition.folder
    assert definition.recorded_answers(folder / "1") == folder / "check.npz"
    assert definition.recorded_answers(folder / "2") == folder / "2" / "check.npz"
    without = models.made("n", {"1/model.onnx": ""})
    assert without.recorded_answers(without.folder / "1") is None


def test_recorded_answers_lie_in_the_repository(models: Models, tmp_path: Path) -> None:
    definition = models.made("m", {"1/model.onnx": ""})
    (tmp_path / "elsewhere").touch()
    (definition.folder / "1" / "check.npz").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(
        ServeError, match=r"recorded answers 'check\.npz' is a link that leads out of the model repository"
    ):
        definition.recorded_answers(definition.folder / "1")


def test_recorded_answers_beside_a_lone_file_are_those_of_its_model(models: Models) -> None:
    folder = models.folder("nets", {"net.onnx": "", "other.onnx": "", "check.npz": ""})
    flat = FlatModel("net.onnx", is_alone=True)
    definition = models.read(folder, name="net", flat=flat)
    assert definition.recorded_answers(folder) == folder / "check.npz"
    assert [path.name for path in flat.files(folder)] == ["check.npz", "net.onnx"], "what a worker may read"
