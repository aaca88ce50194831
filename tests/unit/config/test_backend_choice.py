from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.model_folders import Models

from rocserve.backends.registry import discover_backends
from rocserve.config.definition import ModelDefinition
from rocserve.core.errors import ServeError, StatusCode

Read = Callable[..., ModelDefinition]


@pytest.fixture
def read(models: Models) -> Read:
    def read_files(text: str | None, *files: str) -> ModelDefinition:
        return models.made("m", ({} if text is None else {"config.pbtxt": text}) | dict.fromkeys(files, ""))

    return read_files


@pytest.fixture
def ours(tmp_path: Path) -> Models:
    return Models(tmp_path / "repository", discover_backends())


def _fault(read: Read, text: str | None, *files: str) -> str:
    with pytest.raises(ServeError) as raised:
        read(text, *files)
    assert raised.value.code is StatusCode.INVALID_ARGUMENT
    return raised.value.text


@pytest.mark.parametrize(
    ("text", "backend"),
    [
        ('platform: "onnxruntime_onnx"', "onnx"),
        ('platform: "onnx_onnxv1"', "onnx"),
        ('backend: "onnxruntime"', "onnx"),
        ('platform: "onnxruntime_onnx" backend: "onnxruntime"', "onnx"),
        ('backend: "python"', "python"),
        ('platform: "rocal_json"', "rocal"),
        ('default_model_filename: "net.onnx"', "onnx"),
        ('default_model_filename: "net.mxr"', "migraphx"),
    ],
)
def test_named_backend(read: Read, text: str, backend: str) -> None:
    definition = read(text)
    assert definition.config.backend == backend
    assert definition.backend is not None
    assert definition.backend.name == backend


@pytest.mark.parametrize(
    ("file", "backend"),
    [
        ("1/model.onnx", "onnx"),
        ("1/model.mxr", "migraphx"),
        ("1/model.pb", "migraphx"),
        ("1/pipeline.json", "rocal"),
        ("1/other.json", "rocal"),
        ("1/model.py", "python"),
        ("model.onnx", "onnx"),
    ],
)
def test_backend_of_the_file(read: Read, file: str, backend: str) -> None:
    assert read(None, file).config.backend == backend


def test_exact_names_go_before_patterns(read: Read) -> None:
    assert read(None, "1/model.onnx", "1/notes.json").config.backend == "onnx"


def test_highest_version_decides(read: Read) -> None:
    assert read(None, "1/model.py", "2/model.onnx").config.backend == "onnx"


def test_files_of_two_backends(read: Read) -> None:
    assert _fault(read, None, "1/model.onnx", "1/model.py") == (
        "must specify 'platform' or 'backend' for 'm': the files in 1/ (model.onnx, model.py) fit several backends:"
        " onnx, python"
    )


def test_files_of_no_backend(read: Read) -> None:
    fault = _fault(read, None, "1/weights.bin")
    assert fault.startswith(
        "must specify 'platform' or 'backend' for 'm': the files in 1/ (weights.bin) fit no backend (known model files:"
        " onnx: model.onnx; "
    )


def test_the_repair_renames_the_only_file_to_the_expected_name(read: Read) -> None:
    fault = _fault(read, None, "1/my net.onnx")
    before, moved = fault.split("; repair it with: mv ")
    old, new = shlex.split(moved)
    assert before.endswith("python: model.py)")
    assert (Path(old).name, new) == ("my net.onnx", str(Path(old).with_name("model.onnx")))


@pytest.mark.parametrize(
    ("files", "text"),
    [(("1/my net.onnx",), "; repair it with: mv "), ((), "the files in 1/ (no files) fit no backend")],
)
def test_recorded_answers_are_never_the_model(read: Read, files: Sequence[str], text: str) -> None:
    assert text in _fault(read, None, *files, "1/check.npz")


def test_several_files_get_no_repair(read: Read) -> None:
    assert "repair" not in _fault(read, None, "1/net.onnx", "1/notes.txt")


@pytest.mark.parametrize("name", ["model.pth", "model.safetensors", "pytorch_model.bin"])
def test_files_of_weights(read: Read, name: str) -> None:
    assert _fault(read, None, f"1/{name}").endswith(
        "; such files hold weights without the network: write it as a program with"
        " torch.export.save(torch.export.export(model.eval(), inputs), 'model.pt2'), or write a model.py that loads it"
    )


@pytest.mark.parametrize("name", ["model.pkl", "pipeline.joblib", "model.cbm", "model.ubj", "net.keras"])
def test_files_of_frameworks_that_need_a_conversion(read: Read, name: str) -> None:
    assert "; convert such a model to ONNX, with skl2onnx (scikit-learn), " in _fault(read, None, f"1/{name}")


@pytest.mark.parametrize(
    "files",
    [
        ("1/saved_model.pb", "1/variables/variables.index"),
        ("1/model.savedmodel/saved_model.pb", "1/model.savedmodel/variables/variables.index"),
        ("saved_model.pb", "variables/variables.index"),
    ],
)
def test_a_saved_model_is_called_by_its_name(read: Read, files: Sequence[str]) -> None:
    fault = _fault(read, None, *files)
    assert "of model 'm' holds a TensorFlow SavedModel (" in fault
    assert fault.endswith(
        "convert it with python -m tf2onnx.convert --saved-model FOLDER --output model.onnx, and serve model.onnx"
    )


def test_a_saved_model_beside_a_model_is_not_in_its_way(read: Read) -> None:
    files = ("1/saved_model.pb", "1/variables/variables.index", "1/model.onnx")
    assert read(None, *files).config.backend == "onnx"


def test_a_saved_model_s_own_file_is_no_graph(read: Read) -> None:
    fault = _fault(read, 'default_model_filename: "saved_model.pb"', "1/saved_model.pb", "1/model.onnx")
    assert "1/ of model 'm' holds a TensorFlow SavedModel (saved_model.pb)" in fault


def test_unknown_backend(read: Read) -> None:
    assert _fault(read, 'backend: "onnxruntimes"') == (
        "unable to find backend library for backend 'onnxruntimes', try specifying runtime on the model configuration."
        " Model 'm'; did you mean 'onnxruntime'?"
    )


def test_unknown_platform(read: Read) -> None:
    assert _fault(read, 'platform: "onnx_onnxv2"') == (
        "unexpected platform type 'onnx_onnxv2' for m; did you mean 'onnx_onnxv1'?"
    )


@pytest.mark.parametrize("platform", ["vitis_xmodel", "amdinfer_cpp", "pytorch_torchscript"])
def test_platforms_of_others_tell_the_way_out(read: Read, platform: str) -> None:
    fault = _fault(read, f'platform: "{platform}"')
    assert fault.startswith(f"unexpected platform type '{platform}' for m; ")
    assert "did you mean" not in fault


@pytest.mark.parametrize("platform", ["rocal_json", "nothing"])
def test_platform_and_backend_disagree(read: Read, platform: str) -> None:
    assert _fault(read, f'platform: "{platform}" backend: "onnxruntime"') == (
        f"unexpected 'platform' and 'backend' pair, got:{platform}, onnxruntime (model 'm'); remove one of them"
    )


@pytest.mark.parametrize(
    ("text", "backend", "way"),
    [
        ('platform: "tensorflow_savedmodel"', "tensorflow", "convert the model to ONNX"),
        ('platform: "tensorflow_savedmodel" backend: "tensorflow"', "tensorflow", "convert the model to ONNX"),
        ('platform: "tensorrt_plan" backend: "tensorrt"', "tensorrt", "such engines run on NVIDIA GPUs only"),
        ('backend: "dali"', "dali", "write the pipeline for platform 'rocal_json'"),
        ('backend: "vllm"', "vllm", "serve it with that project's own server"),
    ],
)
def test_backends_of_triton_that_are_not_here(ours: Models, text: str, backend: str, way: str) -> None:
    assert ours.fault_of("m", {"config.pbtxt": text, "1/model.plan": ""}).startswith(
        f"unable to find backend library for backend '{backend}', try specifying runtime on the model configuration."
        f" Model 'm'; {way}"
    )


@pytest.mark.parametrize("platform", ["", "onnxruntime_onnx", "tensorflow_savedmodel", "anything"])
def test_a_python_model_may_have_any_platform(ours: Models, platform: str) -> None:
    text = f'platform: "{platform}" backend: "python"'
    definition = ours.made("m", {"config.pbtxt": text, "1/model.py": ""})
    assert definition.backend is not None and definition.backend.name == "python"
    assert definition.message.platform == platform
