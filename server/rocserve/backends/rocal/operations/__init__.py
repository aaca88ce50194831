"""The operations of a pipeline, with rocAL's semantics.

An operation takes images of UINT8 pixels and gives one of UINT8 or FP32. Sizes and positions are pixels unless said
otherwise. There are three kinds, in `base`: an `Operation` makes an image of one other, a `PairOperation` of two, a
`Measurement` tells something of the image that was sent. In a pipeline file each of the first two reads the image of
the step before it (the first one: what the decoder gives), unless its "inputs" say which: names that earlier steps were
given by "name", or "decoded". A pair always says.

To add an operation, write its class, a frozen dataclass, in the module of its kind and name it in that module's
OPERATIONS. Names in CamelCase are those of AMD Inference Server's JSON, names in snake_case those of amd.rocal's fn.
"""

from __future__ import annotations

from rocserve.backends.rocal.operations import (
    arithmetic,
    color,
    cropping,
    filters,
    geometry,
    levels,
    normalize,
    resize,
    scaling,
)
from rocserve.backends.rocal.operations.base import PipelineOperation

_MODULES = (resize, normalize, cropping, scaling, geometry, levels, color, filters, arithmetic)

OPERATIONS: dict[str, type[PipelineOperation]] = {
    operation.name: operation for module in _MODULES for operation in module.OPERATIONS
}
"""By the name in the JSON key "operation"."""
