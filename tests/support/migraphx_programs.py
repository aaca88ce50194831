"""Makes MIGraphX programs from models in memory, and runs the same models on ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from rocserve.backends.migraphx.binding import Array, Binding, DimensionRange, MigraphxError, Program
from support.migraphx_models import shapes_at


class ProgramFactory:
    """Makes programs from models in memory, on one binding."""

    def __init__(self, binding: Binding, folder: Path) -> None:
        self.binding = binding
        self.folder = folder

    def file(self, content: bytes, name: str = "model.onnx") -> Path:
        path = self.folder / name
        path.write_bytes(content)
        return path

    def parse(self, model: bytes, batch: int = 1, **shapes: tuple[int | DimensionRange, ...]) -> Program:
        """`batch`: number for each symbolic dimension, if there are no shapes."""
        return self.binding.parse_onnx(self.file(model), shapes or shapes_at(model, batch))

    def compiled(self, model: bytes, batch: int = 1, **shapes: tuple[int | DimensionRange, ...]) -> Program:
        program = self.parse(model, batch, **shapes)
        program.compile("ref")
        return program


def onnx_runtime(model: bytes, inputs: Mapping[str, Array]) -> list[Array]:
    """Run the model on ONNX Runtime."""
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return [np.asarray(output) for output in session.run(None, dict(inputs))]


def refusal(call: Callable[[], object]) -> str:
    """The text of the MigraphxError that the call raises."""
    with pytest.raises(MigraphxError) as caught:
        call()
    return str(caught.value)
