"""Reads from an ONNX graph what made-up inputs need and what no experiment shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rocserve.load_check.facts import GraphFacts

if TYPE_CHECKING:
    import onnx


def onnx_facts(model: onnx.ModelProto | Path) -> GraphFacts:
    """Return the facts of a model or of a file; external data is not read. A file that is not an ONNX model has no
    facts."""
    raise NotImplementedError


def expose(model: onnx.ModelProto, tensors: Sequence[str]) -> None:
    """Make inner tensors outputs of the model."""
    raise NotImplementedError
