"""The model that a tool works on, changes by its command line, and its description by the real engines outside of a
server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.migraphx_models import mlp

from rocserve.backends.registry import discover_backends
from rocserve.config.definition import FolderReading, ModelDefinition
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.settings import EngineSettings
from rocserve.verbs.config import describe
from rocserve.verbs.model_choice import ModelOptions, ToolModel, find_model

_ACCELERATED = """
platform: "onnx_onnxv1"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 4 }
output { name: "y" data_type: TYPE_FP32 dims: 4 }
parameters { key: "batch" value { string_value: "8" } }
parameters { key: "calibration_samples" value { string_value: "3" } }
optimization { execution_accelerators { gpu_execution_accelerator {
  name: "migraphx"
  parameters { key: "precision" value: "int8" }
  parameters { key: "calibration_data" value: "samples.npz" }
} } }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "m"
    for version in ("1", "4"):
        (folder / version).mkdir(parents=True)
        (folder / version / "model.onnx").touch()
    (folder / "config.pbtxt").write_text(_ACCELERATED)
    return folder


def _found(path: Path, **options: Any) -> ToolModel:
    return find_model(ModelOptions(path, **options))


def test_a_folder_is_taken_as_a_server_would_take_it(folder: Path) -> None:
    model = _found(folder)
    assert (model.source.name, model.source.version, model.backend.name) == ("m", 4, "onnx")
    assert model.source.model_file == folder / "4" / "model.onnx"
    assert model.source.config.parameters["batch"] == "8"


def test_a_bare_file_has_what_its_ending_says(tmp_path: Path) -> None:
    for name, backend in (
        ("a.onnx", "onnx"),
        ("b.pb", "tensorflow"),
        ("c.GraphDef", "tensorflow"),
        ("d.mxr", "migraphx"),
        ("e.pt2", "pytorch"),
    ):
        (tmp_path / name).touch()
        model = _found(tmp_path / name)
        assert (model.backend.name, model.source.name, model.is_bare) == (backend, name[0], True)


def test_models_that_take_no_arrays(tmp_path: Path) -> None:
    file = tmp_path / "m/1/model.py"
    file.parent.mkdir(parents=True)
    file.touch()
    with pytest.raises(
        ServeError, match=r"has the ending '\.py'; expected one of \.mxr, \.onnx, \.pt2, \.pt, \.graphdef, \.pb, or a"
    ):
        _found(file)
    with pytest.raises(ServeError, match="is of backend 'python', whose models no engine runs"):
        _found(tmp_path / "m")


def test_batch_sizes_of_the_command_line_take_the_place_of_all_others(folder: Path) -> None:
    config = _found(folder, batch_sizes=(1, 16)).source.config
    assert (config.parameters["batch_sizes"], config.max_batch_size) == ("1,16", 16)
    assert "batch" not in config.parameters
    assert _found(folder, batch_sizes=(2,)).source.config.max_batch_size == 8


def test_a_precision_without_calibration_leaves_out_what_calibrates(folder: Path) -> None:
    config = _found(folder, precision=("fp16",)).source.config
    assert config.parameters["precision"] == "fp16"
    assert "calibration_samples" not in config.parameters
    assert config.gpu_accelerators[0].parameters == {"precision": "int8"}
    config = _found(folder, precision=("fp8",)).source.config
    assert config.parameters["calibration_samples"] == "3"
    assert config.gpu_accelerators[0].parameters["calibration_data"] == "samples.npz"


def test_calibration_data_are_named_as_the_configuration_would(folder: Path, tmp_path: Path) -> None:
    data = folder / "data" / "samples.npz"
    data.parent.mkdir()
    data.touch()
    assert _found(folder, calibration_data=data).source.config.parameters["calibration_data"] == ("data/samples.npz")
    bare = tmp_path / "elsewhere" / "m.onnx"
    bare.parent.mkdir()
    bare.touch()
    model = _found(bare, calibration_data=data)
    assert model.source.config.parameters["calibration_data"] == "m/data/samples.npz"
    assert model.source.model_folder == tmp_path


def test_a_model_that_does_not_batch(folder: Path) -> None:
    config = folder / "config.pbtxt"
    config.write_text(_ACCELERATED.replace("max_batch_size: 8", "max_batch_size: 0"))
    with pytest.raises(ServeError, match=r"^does not batch \(max_batch_size: 0\)"):
        _found(folder, batch_sizes=(2,))


def test_no_version(folder: Path) -> None:
    for version in ("1", "4"):
        (folder / version).rename(folder / f"v{version}")
    with pytest.raises(ServeError, match="at least one version must be available"):
        _found(folder)


COMPLETES_ITSELF = """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [4]})
        config.add_output({"name": "OUT", "data_type": "TYPE_INT64", "dims": [1]})
        config.set_max_batch_size(16)
        return config

    def execute(self, requests):
        return []
"""


def python_model(folder: Path, text: str) -> ModelDefinition:
    version = folder / "m" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(text)
    (folder / "m" / "config.pbtxt").write_text('backend: "python"')
    (definition,) = FolderReading(folder / "m", discover_backends()).definitions()
    return definition


def onnx_model(folder: Path, config: str, data: bytes) -> ModelDefinition:
    version = folder / "net" / "1"
    version.mkdir(parents=True)
    (version / "model.onnx").write_bytes(data)
    (folder / "net" / "config.pbtxt").write_text(config)
    (definition,) = FolderReading(folder / "net", discover_backends()).definitions()
    return definition


ON_MIGRAPHX = """
platform: "onnx_onnxv1"
max_batch_size: 4
parameters { key: "engine" value { string_value: "migraphx" } }
parameters { key: "target" value { string_value: "ref" } }
"""


def test_a_model_on_migraphx(tmp_path: Path, migraphx_root: Path) -> None:
    settings = EngineSettings(str(tmp_path / "cache"), migraphx_root=str(migraphx_root))
    signature = describe(onnx_model(tmp_path, ON_MIGRAPHX, mlp()), 1, settings)
    assert [(spec.name, spec.datatype, spec.shape) for spec in signature.inputs] == [("x", DataType.FP32, (-1, 16))]
    assert [(spec.name, spec.datatype, spec.shape) for spec in signature.outputs] == [
        ("scores", DataType.FP32, (-1, 10))
    ]
    assert signature.supports_batching


def test_migraphx_that_is_not_where_it_is_said_to_be(tmp_path: Path) -> None:
    settings = EngineSettings(str(tmp_path / "cache"), migraphx_root=str(tmp_path))
    text = rf"model 'net' needs MIGraphX \(parameter 'engine' says so\): MIGraphX is not in {tmp_path}.*; or set the"
    with pytest.raises(ServeError, match=text):
        describe(onnx_model(tmp_path, ON_MIGRAPHX, mlp()), 1, settings)


def test_a_python_model_tells_its_inputs_and_outputs(tmp_path: Path) -> None:
    signature = describe(python_model(tmp_path, COMPLETES_ITSELF), 1)
    assert [(spec.name, spec.datatype) for spec in signature.inputs] == [("IN", DataType.FP32)]
    assert [(spec.name, spec.datatype) for spec in signature.outputs] == [("OUT", DataType.INT64)]
    assert signature.max_batch_size == 16
