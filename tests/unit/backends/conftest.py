"""Models and images as a worker receives them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.amd_rocal import stand_in
from support.waiting import PATIENCE_SECONDS

from rocserve.backends.base import LoadedModel, ModelSource
from rocserve.backends.rocal.backend import load
from rocserve.core.model_config import InputConfig, InstanceGroup, InstanceKind, ModelConfig, OutputConfig
from rocserve.settings import EngineSettings

SourceMaker = Callable[..., ModelSource]


@pytest.fixture
def rocal() -> Iterator[ModuleType]:
    """The rocal_pybind that stands in for the real one."""
    with stand_in() as native:
        yield native


@pytest.fixture
def model_source(tmp_path: Path) -> SourceMaker:
    """Write a version folder with one file, and describe it as a model source. On a busy machine, too, its load check
    has the time for a verdict."""

    def make(
        filename: str,
        content: bytes | Mapping[str, Any],
        *,
        inputs: Sequence[InputConfig] = (),
        outputs: Sequence[OutputConfig] = (),
        max_batch_size: int = 0,
        parameters: Mapping[str, str] | None = None,
        kind: InstanceKind = InstanceKind.AUTO,
        instance_count: int = 1,
        instance_groups: Sequence[InstanceGroup] = (),
    ) -> ModelSource:
        folder = tmp_path / "model" / "1"
        folder.mkdir(parents=True, exist_ok=True)
        model_file = folder / filename
        model_file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        config = ModelConfig(
            name="model",
            max_batch_size=max_batch_size,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            parameters=dict(parameters or {}),
            instance_groups=tuple(instance_groups),
        )
        settings = EngineSettings(load_check_seconds=PATIENCE_SECONDS)
        return ModelSource(
            "model", 1, folder.parent, folder, model_file, config, kind, None, instance_count, settings=settings
        )

    return make


@pytest.fixture
def served(model_source: SourceMaker) -> Callable[..., LoadedModel]:
    """Load a rocAL pipeline, given as its JSON and the options of a model source."""
    return lambda document, **options: load(model_source("pipeline.json", document, **options))
