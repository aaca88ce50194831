"""What is known where an operation is said in amd.rocal, and what there is to know of how it is said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rocserve.backends.rocal.amd.binding import Binding
from rocserve.backends.rocal.image import Extent, ResultExtent

Tensor = Any
"""rocAL's handle on an image of the graph, or on a batch's result."""


@dataclass(frozen=True, slots=True)
class Node:
    """Where a node of the graph is made and what it is to give."""

    binding: Binding
    handle: Any
    """Of the rocAL pipeline."""
    layout: Any
    datatype: Any
    """Both of amd.rocal.types."""
    source: ResultExtent
    """The (first) image that it reads, as far as its size is the same for all images."""
    is_grey: bool
    """Grey images stand in rocAL as planes, colour ones do not."""
    batch_size: int

    @property
    def output(self) -> dict[str, Any]:
        return {"output_layout": self.layout, "output_dtype": self.datatype}

    @property
    def is_float(self) -> bool:
        return bool(self.datatype == self.binding.types.FLOAT)


def _never_refused(operation: Any, source: ResultExtent) -> str | None:
    return None


def _fits_all(operation: Any, known: Extent, source: Extent) -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Expression:
    """An operation in amd.rocal."""

    make: Callable[[Node, Any, Sequence[Tensor]], Tensor]
    """Adds the node that makes an image of others."""
    gives_floats: bool = False
    """Whether FP32 can be had. Where not, UINT8 is asked for and converted: RPP's kernels that write FP32 for UINT8 are
    those that normalise; of all other operations rocAL leaves an FP32 tensor unwritten, and says nothing."""
    gives_layouts: bool = False
    """Whether rocAL can hand out channels first or last as asked for. Where not, it keeps the source's layout."""
    only_planes: bool = False
    """Whether an output is to be asked for with its channels first, since rocAL's kernel for the other layout errs."""
    fills_result: bool = False
    """Whether all of the result is written, though rocAL calls less of it valid."""
    refusal: Callable[[Any, ResultExtent], str | None] = _never_refused
    """Why it cannot be done, given what is known of its source; None = it can."""
    misfit: Callable[[Any, Extent, Extent], str | None] = _fits_all
    """Why an image cannot be worked on, where rocAL would read other memory; None = it can. Of the two extents the
    first is what was known of the valid part of the source when the graph was made, the second is this image's."""


def needs_whole_source(operation: Any, source: ResultExtent) -> str | None:
    """The refusal of operations after which rocAL loses track of what is valid."""
    if None not in (source.size.height, source.size.width) and source.size == source.valid:
        return None
    return "rocAL does this only with images that all have one size; resize to a fixed size before"
