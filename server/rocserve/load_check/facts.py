"""Facts in a model's file about rows and values, for the checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LARGEST_COMPARED = 300
"""In GraphFacts.compared: engines differ in larger numbers, however they compute."""
MOST_THRESHOLDS = 4
"""Each costs two runs of a batch. Graphs with more compare sizes of loops, seldom values."""


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """Facts of a model file. Engines that cannot read a graph use NO_FACTS."""

    ends: Mapping[str, int] = field(default_factory=dict)
    """Integer input -> exclusive end of its values, from the table that it indexes."""
    levels: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Input of numbers -> those that trees compare it with, or that operators look up."""
    tables: tuple[int, ...] = ()
    """Sizes of constants that the model slices to an input's length, such as a table of positions."""
    words: tuple[str, ...] = ()
    """Texts that operators know: vocabularies, categories."""
    couples_rows: str = ""
    """Why rows depend on each other, if the operators alone decide it: "DynamicQuantizeLinear takes one scale from
    all rows"; "" = an experiment decides."""
    is_random: str = ""
    """The operator whose results differ between equal runs; "" = none."""
    precision: str = "fp32"
    """The coarsest numbers that the file computes with: "fp32", "fp16", "bf16", or "quantised"."""
    exposed: tuple[str, ...] = ()
    """Inner tensors from which labels and indices are chosen. The rows check sees more if they are outputs, too."""
    thresholds: tuple[float, ...] = ()
    """Constants that choose the model's branch: If and Where compare a number of the batch with them."""
    compared: tuple[float, ...] = ()
    """Constants that the model compares numbers with: beyond each, it may compute something else."""
    texts: tuple[str, ...] = ()
    """Constants that the model compares texts with."""
    narrowed: Mapping[str, str] = field(default_factory=dict)
    """Output of integers that cannot hold every float -> the tensor that a Cast makes them from."""


NO_FACTS = GraphFacts()
