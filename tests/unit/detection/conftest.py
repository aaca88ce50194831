"""The numeric core of the sample repository's post-processing, as the Python model that uses it imports it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

CORE = Path(__file__).parents[3] / "model_repository" / "yolov4_postprocess" / "1" / "yolo.py"


@pytest.fixture(scope="package")
def yolo() -> Iterator[ModuleType]:
    name = "sample_yolo"
    spec = importlib.util.spec_from_file_location(name, CORE)
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their own module up.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]
