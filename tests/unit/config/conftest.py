"""A registry like the real one, and a repository."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from support.model_folders import Models

from rocserve.backends.base import BackendSpec, EngineSpec
from rocserve.backends.registry import BackendRegistry
from rocserve.core.datatypes import DataType
from rocserve.core.requests import Signature, TensorSpec


def _spec(name: str, platforms: tuple[str, ...], filenames: tuple[str, ...], thread_safe: bool) -> BackendSpec:
    return BackendSpec(
        name=name,
        platforms=platforms,
        engines=(EngineSpec(name, f"engines.{name}", thread_safe, forks_from_zygote=True),),
        model_filenames=filenames,
        models_are_data=name != "python",
    )


@pytest.fixture
def registry() -> BackendRegistry:
    return BackendRegistry(
        [
            _spec("onnx", ("onnx_onnxv1", "onnxruntime_onnx", "onnxruntime"), ("model.onnx",), True),
            _spec(
                "migraphx", ("migraphx_mxr", "tensorflow_graphdef"), ("model.mxr", "model.graphdef", "model.pb"), False
            ),
            _spec("rocal", ("rocal_json", "rocal"), ("pipeline.json", "model.json", "*.json"), True),
            _spec("python", ("python",), ("model.py",), False),
        ]
    )


@pytest.fixture
def models(tmp_path: Path, registry: BackendRegistry) -> Models:
    return Models(tmp_path / "repository", registry)


MakeSignature = Callable[..., Signature]
Tensors = Mapping[str, tuple[str, tuple[int, ...]]]


@pytest.fixture
def make_signature() -> MakeSignature:
    """make_signature({"x": ("FP32", (-1, 4))}, {"y": ...}); whether it batches follows from the first dimensions unless
    it is given."""

    def make(
        inputs: Tensors, outputs: Tensors, *, batching: bool | None = None, optional: tuple[str, ...] = ()
    ) -> Signature:
        specs = [
            tuple(TensorSpec(name, DataType(datatype), shape) for name, (datatype, shape) in tensors.items())
            for tensors in (inputs, outputs)
        ]
        if batching is None:
            batching = all(spec.shape[:1] == (-1,) for spec in (*specs[0], *specs[1]))
        return Signature(specs[0], specs[1], batching, frozenset(optional))

    return make
