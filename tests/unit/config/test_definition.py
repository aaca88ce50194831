from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rocserve.backends.registry import BackendRegistry
from rocserve.config.definition import (
    FolderReading,
    ModelDefinition,
    complete_definition,
    find_model_file,
)
from rocserve.config.request_rules import ConfigRequest
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import ExecutionAccelerator
from rocserve.core.requests import Signature

MakeFolder = Callable[..., Path]
MakeSignature = Callable[..., Signature]
_ONNX = 'backend: "onnxruntime"'


def _one(folder: Path, registry: BackendRegistry, **options: object) -> ModelDefinition:
    (definition,) = FolderReading(folder, registry, **options).definitions()  # type: ignore[arg-type]
    return definition


def _fault(folder: Path, registry: BackendRegistry, **options: object) -> str:
    with pytest.raises(ServeError) as raised:
        _one(folder, registry, **options)
    return raised.value.text


def test_folder_without_a_configuration(make_folder: MakeFolder, registry: BackendRegistry) -> None:
    definition = _one(make_folder("m", {"1/model.onnx": ""}), registry)
    assert definition.name == "m"
    assert definition.backend is not None
    assert definition.backend.name == "onnx"
    assert (definition.message.platform, definition.message.backend) == ("onnx_onnxv1", "onnx")
    assert definition.config.default_model_filename == "model.onnx"
    assert definition.source == "no configuration file"


def test_strict_needs_a_configuration(make_folder: MakeFolder, registry: BackendRegistry) -> None:
    fault = _fault(make_folder("m", {"1/model.onnx": ""}), registry, strict=True)
    assert fault.startswith("failed to open text file for read ")
    assert "config.pbtxt: No such file or directory" in fault


def test_strict_needs_a_platform(make_folder: MakeFolder, registry: BackendRegistry) -> None:
    folder = make_folder("m", {"config.pbtxt": "max_batch_size: 2", "1/model.onnx": ""})
    assert _fault(folder, registry, strict=True) == "must specify 'platform' or 'backend' for 'm'"
    assert _one(folder, registry).config.backend == "onnx"


def test_name_must_be_the_folders(make_folder: MakeFolder, registry: BackendRegistry) -> None:
    folder = make_folder("m", {"config.pbtxt": f'name: "n" {_ONNX}'})
    assert _fault(folder, registry) == (
        "unexpected directory name 'm' for model 'n', directory name must equal model name"
    )
    assert _one(folder, registry, name="n").name == "n"


def test_fault_in_the_file_tells_its_place(make_folder: MakeFolder, registry: BackendRegistry) -> None:
    folder = make_folder("m", {"config.pbtxt": "\n  max_batch_sise: 1"})
    assert _fault(folder, registry).startswith("config.pbtxt:2:3: unknown field 'max_batch_sise'")


def test_fault_is_told_at_once_however_many_empty_lines_follow(
    make_folder: MakeFolder, registry: BackendRegistry
) -> None:
    folder = make_folder("m", {"config.pbtxt": "bogus" + "\n" * 1_000_000})
    assert "unknown field 'bogus'" in _fault(folder, registry)


def test_chosen_configuration(make_folder: MakeFolder, registry: BackendRegistry) -> None:
    folder = make_folder(
        "m",
        {
            "config.pbtxt": f"{_ONNX} max_batch_size: 1",
            "configs/large.pbtxt": f"{_ONNX} max_batch_size: 64",
            "1/model.onnx": "",
        },
    )
    assert _one(folder, registry, config_name="large").config.max_batch_size == 64
    assert _one(folder, registry, config_name="absent").config.max_batch_size == 1
    assert "must be a path within" in _fault(folder, registry, config_name="../../secret")


def test_override_replaces_the_file(make_folder: MakeFolder, registry: BackendRegistry) -> None:
    folder = make_folder("m", {"config.pbtxt": "not a configuration", "1/model.onnx": ""})
    override = '{"backend": "onnxruntime", "max_batch_size": 3}'
    assert _one(folder, registry, request=ConfigRequest(override)).config.max_batch_size == 3
    assert _fault(folder, registry, request=ConfigRequest("{")).startswith("Invalid config override: ")
    assert _fault(folder, registry, request=ConfigRequest('{"name": "n"}')).startswith("unexpected directory name 'm'")


def test_unsupported_settings_are_refused_at_once(make_folder: MakeFolder, registry: BackendRegistry) -> None:
    folder = make_folder("m", {"config.pbtxt": f"{_ONNX} model_transaction_policy {{ decoupled: true }}"})
    with pytest.raises(ServeError) as raised:
        _one(folder, registry)
    assert raised.value.code is StatusCode.UNIMPLEMENTED


def test_amds_triton_port(make_folder: MakeFolder, registry: BackendRegistry) -> None:
    text = """
    name: "resnet" backend: "onnxruntime"
    optimization { execution_accelerators { gpu_execution_accelerator {
      name: "migraphx" parameters { key: "migraphx_max_dynamic_batch" value: "8" } } } }
    """
    folder = make_folder("resnet", {"config.pbtxt": text, "0/model.onnx": ""})
    definition = _one(folder, registry)
    assert definition.warnings == ()
    assert definition.config.gpu_accelerators == (
        ExecutionAccelerator("migraphx", {"migraphx_max_dynamic_batch": "8"}),
    )
    assert find_model_file(definition, folder / "0") == folder / "0" / "model.onnx"


@pytest.mark.parametrize("broken", ["[[models]", 'name = "m"\nplatform = ', "tool = { a = 1 }"])
def test_foreign_toml_is_left_alone(make_folder: MakeFolder, registry: BackendRegistry, broken: str) -> None:
    folder = make_folder("m", {"pyproject.toml": broken, "1/model.py": ""})
    assert not _one(folder, registry).is_amd


def test_pbtxt_of_another_name(make_folder: MakeFolder, registry: BackendRegistry) -> None:
    folder = make_folder("m", {"my.pbtxt": _ONNX, "1/model.onnx": ""})
    assert _one(folder, registry).source == "my.pbtxt"
    (folder / "other.pbtxt").write_text(_ONNX)
    assert _fault(folder, registry) == (
        "model 'm' has several configuration files: my.pbtxt, other.pbtxt; name the right one config.pbtxt"
    )


def test_triton_configuration_wins_over_toml(make_folder: MakeFolder, registry: BackendRegistry) -> None:
    folder = make_folder("m", {"config.pbtxt": _ONNX, "config.toml": "not = [toml", "1/model.onnx": ""})
    assert _one(folder, registry).source == "config.pbtxt"


class TestEnsemble:
    _TEXT = """
    platform: "ensemble" max_batch_size: 4
    input { name: "in" data_type: TYPE_FP32 dims: 2 }
    output { name: "out" data_type: TYPE_FP32 dims: 2 label_filename: "labels.txt" }
    ensemble_scheduling { step {
      model_name: "a" model_version: -1
      input_map { key: "x" value: "in" } output_map { key: "y" value: "out" } } }
    """

    def test_needs_no_model(self, make_folder: MakeFolder, registry: BackendRegistry) -> None:
        folder = make_folder("e", {"config.pbtxt": self._TEXT, "labels.txt": "a\nb\n"})
        definition = _one(folder, registry)
        assert definition.is_ensemble
        assert definition.config.backend == "ensemble"
        complete = complete_definition(definition, None)
        assert complete.config.outputs[0].labels == ("a", "b")
        assert find_model_file(complete, folder / "1") == folder / "1"

    def test_needs_its_tensors(self, make_folder: MakeFolder, registry: BackendRegistry) -> None:
        start = self._TEXT.index("ensemble_scheduling")
        folder = make_folder("e", {"config.pbtxt": 'platform: "ensemble" ' + self._TEXT[start:]})
        assert _fault(folder, registry) == "ensemble tensor 'out' is unused in ensemble 'e'"


class TestModelFile:
    def test_alone(self, make_folder: MakeFolder, registry: BackendRegistry) -> None:
        folder = make_folder("m", {"config.pbtxt": _ONNX, "1/model.onnx": ""})
        assert find_model_file(_one(folder, registry), folder / "1") == folder / "1" / "model.onnx"

    def test_given_name(self, make_folder: MakeFolder, registry: BackendRegistry) -> None:
        text = f'{_ONNX} default_model_filename: "sub/net.onnx"'
        folder = make_folder("m", {"config.pbtxt": text, "1/sub/net.onnx": "", "1/model.onnx": ""})
        assert find_model_file(_one(folder, registry), folder / "1") == folder / "1" / "sub" / "net.onnx"

    def test_missing(self, make_folder: MakeFolder, registry: BackendRegistry) -> None:
        folder = make_folder("m", {"config.pbtxt": _ONNX, "1/resnet.onnx": "", "1/a.txt": ""})
        with pytest.raises(ServeError) as raised:
            find_model_file(_one(folder, registry), folder / "1")
        assert raised.value.text == (
            "unable to find the model file of 'm' in version folder 1: expected model.onnx, found a.txt,"
            " resnet.onnx. Rename the file or set default_model_filename"
        )

    def test_versions_may_hold_different_names(self, make_folder: MakeFolder, registry: BackendRegistry) -> None:
        folder = make_folder("m", {"config.pbtxt": 'backend: "rocal"', "1/model.json": "", "2/mine.json": ""})
        definition = _one(folder, registry)
        assert definition.config.default_model_filename == "mine.json"
        assert find_model_file(definition, folder / "1").name == "model.json"
        assert find_model_file(definition, folder / "2").name == "mine.json"

    def test_several_files_fit_a_pattern(self, make_folder: MakeFolder, registry: BackendRegistry) -> None:
        folder = make_folder("m", {"config.pbtxt": 'backend: "rocal"', "1/a.json": "", "1/b.json": "", "1/.c.json": ""})
        with pytest.raises(ServeError, match=r"json, found 2 that match: a\.json, b\.json\. Rename"):
            find_model_file(_one(folder, registry), folder / "1")

    def test_no_way_out_of_the_repository(
        self, make_folder: MakeFolder, registry: BackendRegistry, tmp_path: Path
    ) -> None:
        (tmp_path / "secret.onnx").write_text("")
        folder = make_folder("m", {"config.pbtxt": _ONNX, "1/other": ""})
        (folder / "1" / "model.onnx").symlink_to(tmp_path / "secret.onnx")
        with pytest.raises(ServeError, match=r"model file of 'm' 'model\.onnx' is a link that leads out of the model"):
            find_model_file(_one(folder, registry), folder / "1")

    def test_links_within_the_repository(self, make_folder: MakeFolder, registry: BackendRegistry) -> None:
        other = make_folder("other", {"1/model.onnx": ""})
        folder = make_folder("m", {"config.pbtxt": _ONNX, "1/keep": ""})
        (folder / "1" / "model.onnx").symlink_to(other / "1" / "model.onnx")
        definition = _one(folder, registry, repository=folder.parent)
        assert find_model_file(definition, folder / "1") == folder / "1" / "model.onnx"
        with pytest.raises(ServeError, match="leads out of the model repository"):
            find_model_file(_one(folder, registry), folder / "1")

    @pytest.mark.parametrize("name", ["../2/model.onnx", "/etc/passwd"])
    def test_names_that_leave_the_folder(self, make_folder: MakeFolder, registry: BackendRegistry, name: str) -> None:
        folder = make_folder("m", {"config.pbtxt": f'{_ONNX} default_model_filename: "{name}"', "2/model.onnx": ""})
        (folder / "1").mkdir()
        with pytest.raises(ServeError, match="must be a path within the folder 1, without"):
            find_model_file(_one(folder, registry), folder / "1")


class TestLabels:
    def _text(self, filename: str) -> str:
        output = f'output {{ name: "y" data_type: TYPE_FP32 dims: 3 label_filename: "{filename}" }}'
        return f"{_ONNX} max_batch_size: 2 {output}"

    def test_lines(self, make_folder: MakeFolder, registry: BackendRegistry, make_signature: MakeSignature) -> None:
        folder = make_folder("m", {"config.pbtxt": self._text("a/l.txt"), "a/l.txt": "cat\r\n\nüber hund"})
        definition = _one(folder, registry)
        assert definition.config.outputs[0].labels == ("cat", "", "über hund")
        signature = make_signature({"x": ("FP32", (-1, 1))}, {"y": ("FP32", (-1, 3))})
        assert complete_definition(definition, signature).config.outputs[0].labels == ("cat", "", "über hund")

    def test_missing(self, make_folder: MakeFolder, registry: BackendRegistry) -> None:
        fault = _fault(make_folder("m", {"config.pbtxt": self._text("l.txt")}), registry)
        assert fault.startswith("failed to open text file for read ")
        assert fault.endswith("(label file of output 'y'; put it in the model's folder)")

    @pytest.mark.parametrize("name", ["../l.txt", "/etc/hostname"])
    def test_outside(self, make_folder: MakeFolder, registry: BackendRegistry, name: str) -> None:
        fault = _fault(make_folder("m", {"config.pbtxt": self._text(name)}), registry)
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
    def test_no_path_has_a_zero_byte(self, make_folder: MakeFolder, registry: BackendRegistry, field: str) -> None:
        fault = _fault(make_folder("m", {"config.pbtxt": f"{_ONNX} {field}"}), registry)
        assert "'a\\x00b' must be a path within the folder" in fault

    def test_link_to_the_outside(self, make_folder: MakeFolder, registry: BackendRegistry, tmp_path: Path) -> None:
        (tmp_path / "secret").write_text("s")
        folder = make_folder("m", {"config.pbtxt": self._text("l.txt")})
        (folder / "l.txt").symlink_to(tmp_path / "secret")
        assert "is a link that leads out of the model repository" in _fault(folder, registry)

    def test_link_within_as_a_mounted_config_map_has(self, make_folder: MakeFolder, registry: BackendRegistry) -> None:
        folder = make_folder("m", {"config.pbtxt": self._text("l.txt"), "..data/l.txt": "a"})
        (folder / "l.txt").symlink_to("..data/l.txt")
        assert _one(folder, registry).config.outputs[0].labels == ("a",)


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
    def test_samples_when_read(
        self, make_folder: MakeFolder, registry: BackendRegistry, tensor: str, fault: str
    ) -> None:
        text = self._text(f'batch_size: 1 inputs {{ key: "x" value {{ {tensor} }} }}')
        assert _fault(make_folder("m", {"config.pbtxt": text}), registry) == f"{fault} (warm-up sample 'w')"

    def test_files(self, make_folder: MakeFolder, registry: BackendRegistry) -> None:
        tensor = 'data_type: TYPE_FP32 dims: 1 input_data_file: "raw"'
        text = self._text(f'batch_size: 1 inputs {{ key: "x" value {{ {tensor} }} }}')
        folder = make_folder("m", {"config.pbtxt": text})
        missing = folder / "warmup" / "raw"
        assert _fault(folder, registry) == (
            f"failed to open text file for read {missing}: No such file or directory (warm-up sample 'w')"
        )
        (folder / "warmup").mkdir()
        (folder / "warmup" / "raw").write_bytes(b"\0\0\0\0")
        assert _one(folder, registry).config.model_warmup[0].inputs["x"].source == "file:raw"

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
    def test_samples_against_the_model(
        self, make_folder: MakeFolder, registry: BackendRegistry, signature: Signature, sample: str, fault: str
    ) -> None:
        definition = _one(make_folder("m", {"config.pbtxt": self._text(sample)}), registry)
        with pytest.raises(ServeError) as raised:
            complete_definition(definition, signature)
        assert raised.value.text == fault


class TestFilesByArchitecture:
    def _definition(self, make_folder: MakeFolder, registry: BackendRegistry) -> tuple[ModelDefinition, Path]:
        text = f'{_ONNX} cc_model_filenames {{ key: "gfx90a" value: "fast.onnx" }}'
        folder = make_folder("m", {"config.pbtxt": text, "1/model.onnx": "", "1/fast.onnx": ""})
        return _one(folder, registry), folder / "1"

    @pytest.mark.parametrize(
        ("architecture", "file"),
        [
            ("gfx90a", "fast.onnx"),
            ("gfx90a:sramecc+:xnack-", "fast.onnx"),
            ("gfx942", "model.onnx"),
            ("", "model.onnx"),
        ],
    )
    def test_choice(self, make_folder: MakeFolder, registry: BackendRegistry, architecture: str, file: str) -> None:
        definition, folder = self._definition(make_folder, registry)
        assert find_model_file(definition, folder, architecture) == folder / file

    def test_the_file_is_missing(self, make_folder: MakeFolder, registry: BackendRegistry) -> None:
        definition, folder = self._definition(make_folder, registry)
        (folder / "fast.onnx").unlink()
        with pytest.raises(ServeError, match=r"expected fast\.onnx, found model\.onnx"):
            find_model_file(definition, folder, "gfx90a")
