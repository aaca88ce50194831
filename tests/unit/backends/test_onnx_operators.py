"""Custom operators of ONNX models, and ONNX Runtime's optimisation level of their graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import onnxruntime
import pytest
from support.machine import ToldMachine
from support.models import add_sub

from rocserve.backends.base import ModelSource
from rocserve.backends.onnx import backend
from rocserve.backends.onnx.engine_choice import choose_engine
from rocserve.backends.onnx.opener import session_options
from rocserve.core.errors import ServeError
from rocserve.core.model_config import ModelConfig

SourceMaker = Callable[..., ModelSource]


def with_library(source: ModelSource, name: str) -> ModelSource:
    config = dataclasses.replace(source.config, operator_libraries=(name,), parameters={"engine": "cpu"})
    return dataclasses.replace(source, config=config)


def fault(source: ModelSource) -> str:
    with pytest.raises(ServeError) as raised:
        backend.load(source)
    return raised.value.text


def test_a_library_is_given_to_onnx_runtime(model_source: SourceMaker) -> None:
    source = model_source("model.onnx", add_sub())
    library = source.model_folder / "operators.so"
    library.write_bytes(b"no library")
    text = fault(with_library(source, "operators.so"))
    assert text.startswith("ONNX Runtime cannot load the custom operators of 'operators.so': ")
    assert "operators.so" in text.partition(": ")[2], "ONNX Runtime's own words"


def test_only_a_library_in_the_models_folder(model_source: SourceMaker) -> None:
    source = model_source("model.onnx", add_sub())
    text = fault(with_library(source, "absent.so"))
    assert text == "custom operator library 'absent.so' is not in the model's folder"
    for name in ("/usr/lib/libc.so.6", "../operators.so"):
        assert fault(with_library(source, name)) == (
            f"custom operator library '{name}' must be a path within its folder, without '..' and not absolute"
        )


def test_a_model_with_custom_operators_is_for_onnx_runtime() -> None:
    config = ModelConfig("m", backend="onnx", operator_libraries=("a.so",))
    choice = choose_engine(config, ToldMachine(gpus=(0,), migraphx=""))
    assert choice.engine.name == "onnxruntime"
    with pytest.raises(ServeError, match="MIGraphX takes no custom operators"):
        choose_engine(dataclasses.replace(config, parameters={"engine": "migraphx"}), ToldMachine(migraphx=""))


@pytest.mark.parametrize(
    ("level", "name"), [(-1, "BASIC"), (0, "ALL"), (1, "EXTENDED"), (2, "DISABLE_ALL"), (7, "ALL")]
)
def test_the_level_of_the_graph(level: int, name: str) -> None:
    expected = f"ORT_{name}" if name == "DISABLE_ALL" else f"ORT_ENABLE_{name}"
    options = session_options(ModelConfig("m", graph_level=level), 1)
    assert options.graph_optimization_level == getattr(onnxruntime.GraphOptimizationLevel, expected)


def test_the_backends_own_parameter_goes_before_it() -> None:
    config = ModelConfig("m", graph_level=2, parameters={"graph_optimization_level": "basic"})
    level = session_options(config, 1).graph_optimization_level
    assert level == onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
