"""What a model file tells of itself, whatever its format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rocserve.core.datatypes import DataType

Dims = tuple[int | str, ...]
"""Each a number, or the name of a dimension that is left open ("" where it has none)."""


@dataclass(frozen=True, slots=True)
class GraphTensor:
    name: str
    datatype: DataType | None
    """None where the file does not tell (TensorFlow's outputs)."""
    dims: Dims | None
    """None where the file does not even tell how many."""


@dataclass(frozen=True, slots=True)
class ModelGraph:
    inputs: tuple[GraphTensor, ...]
    """What a run needs: without the inputs that have a default."""
    outputs: tuple[GraphTensor, ...]
    """In the program's order."""
    weight_bytes: int
    external_files: tuple[Path, ...] = ()
    """Of external data, in the order in which they are first named; each is there and long enough."""
    is_quantised: bool = False
    """Whether it holds quantising operators (QDQ or integer ones)."""
