"""Describing a model with the real engines, outside a server."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.migraphx_models import mlp

from rocserve.backends.registry import discover_backends
from rocserve.config.definition import FolderReading, ModelDefinition
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.settings import EngineSettings
from rocserve.tools.config import describe

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
