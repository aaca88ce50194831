"""Describing a model with the real engines, outside a server."""

from __future__ import annotations

from pathlib import Path

from rocserve.backends.registry import discover_backends
from rocserve.config.definition import ModelDefinition, read_model_definitions
from rocserve.core.datatypes import DataType
from rocserve.tools.signature import describe

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
    (definition,) = read_model_definitions(folder / "m", discover_backends())
    return definition


def test_a_python_model_tells_its_inputs_and_outputs(tmp_path: Path) -> None:
    signature = describe(python_model(tmp_path, COMPLETES_ITSELF), 1)
    assert [(spec.name, spec.datatype) for spec in signature.inputs] == [("IN", DataType.FP32)]
    assert [(spec.name, spec.datatype) for spec in signature.outputs] == [("OUT", DataType.INT64)]
    assert signature.max_batch_size == 16
