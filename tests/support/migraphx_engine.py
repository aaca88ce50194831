"""Loads models on MIGraphX's engine in the test's own process, which must be able to load MIGraphX."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rocserve.backends.base import Batch, ModelSource
from rocserve.backends.migraphx.background_sizes import THREAD_NAME
from rocserve.backends.migraphx.engine import load
from rocserve.backends.migraphx.installation import ROOT_VARIABLE
from rocserve.backends.migraphx.model import MigraphxModel
from rocserve.backends.warmup import as_served
from rocserve.core.datatypes import DataType
from rocserve.core.model_config import InputConfig, InstanceKind, ModelConfig, OutputConfig
from rocserve.core.padding import Padding
from rocserve.core.tensors import tensor_from_numpy
from rocserve.settings import EngineSettings
from support.encoders import VOCABULARY
from support.waiting import PATIENCE_SECONDS

Array = np.ndarray[Any, Any]


def given(name: str, *dims: int, datatype: DataType = DataType.FP32) -> InputConfig:
    return InputConfig(name, datatype, dims)


def wanted(name: str, *dims: int, datatype: DataType = DataType.FP32) -> OutputConfig:
    return OutputConfig(name, datatype, dims)


@dataclass(slots=True)
class Engine:
    """Loads models from one folder with one cache of programs, and records what they report."""

    folder: Path
    cache: Path
    reports: list[str] = field(default_factory=list)

    @property
    def version_folder(self) -> Path:
        return self.folder / "model" / "1"

    @property
    def settings(self) -> EngineSettings:
        return EngineSettings(
            cache_directory=str(self.cache),
            migraphx_root=os.environ[ROOT_VARIABLE],
            # For a verdict on a busy machine, too.
            load_check_seconds=PATIENCE_SECONDS,
        )

    def write(self, filename: str, content: bytes) -> Path:
        self.version_folder.mkdir(parents=True, exist_ok=True)
        path = self.version_folder / filename
        path.write_bytes(content)
        return path

    def source(
        self,
        content: bytes,
        max_batch_size: int = 0,
        *,
        filename: str = "model.onnx",
        backend: str = "onnx",
        inputs: tuple[InputConfig, ...] = (),
        outputs: tuple[OutputConfig, ...] = (),
        kind: InstanceKind = InstanceKind.CPU,
        **parameters: object,
    ) -> ModelSource:
        """The model as a worker receives it. `parameters`: of the configuration, in addition to `target`."""
        path = self.write(filename, content)
        config = ModelConfig(
            name="model",
            backend=backend,
            max_batch_size=max_batch_size,
            inputs=inputs,
            outputs=outputs,
            parameters={"target": "ref", **{name: str(value) for name, value in parameters.items()}},
        )
        return ModelSource(
            name="model",
            version=1,
            model_folder=path.parent.parent,
            version_folder=path.parent,
            model_file=path,
            config=config,
            instance_kind=kind,
            device=None,
            instance_count=1,
            settings=self.settings,
            report=self.reports.append,
        )

    def load(self, *arguments: Any, **parameters: Any) -> MigraphxModel:
        """Load a model without warming it up. Takes the arguments of `source`."""
        model = load(self.source(*arguments, **parameters))
        assert isinstance(model, MigraphxModel)
        return model

    def complete(self, *arguments: Any, **parameters: Any) -> MigraphxModel:
        """Load a model, warm it up, and wait for all its batch sizes."""
        model = self.load(*arguments, **parameters)
        model.warm_up([])
        wait_for_all_sizes()
        return model


def wait_for_all_sizes() -> None:
    """Wait until no model of this process compiles batch sizes any more."""
    for thread in threading.enumerate():
        if thread.name == THREAD_NAME:
            thread.join()


def batch(inputs: Mapping[str, Array], *outputs: str) -> Batch:
    tensors = {name: tensor_from_numpy(name, values) for name, values in inputs.items()}
    rows = next((len(values) for values in inputs.values() if values.ndim), 1)
    return Batch(tensors, outputs, (rows,))


def request(rows: int, length: int) -> dict[str, Array]:
    """Texts for the encoders of support.encoders."""
    chance = np.random.default_rng([rows, length])
    return {
        "input_ids": chance.integers(1, VOCABULARY, (rows, length)),
        "attention_mask": np.ones((rows, length), np.int64),
    }


def padded(inputs: dict[str, Array], padding: Padding) -> dict[str, Array]:
    """The inputs as the server gives them to the engine."""
    served = as_served(batch(inputs), ModelConfig("model"), padding)
    return {name: np.asarray(array) for name, array in served.arrays.items()}


def answers(model: MigraphxModel, inputs: Mapping[str, Array], *outputs: str) -> dict[str, Array]:
    """Run the model; return the named outputs, or all outputs without names."""
    result = model.execute(batch(inputs, *outputs)).outputs
    return {name: np.asarray(values) for name, values in result.items()}
