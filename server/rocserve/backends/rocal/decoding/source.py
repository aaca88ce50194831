"""An image as it came from the client."""

from __future__ import annotations

from typing import Any

import numpy as np

from rocserve.core.tensors import Buffer

SourceImage = Buffer | np.ndarray[Any, Any]
"""One image, as a view: the bytes of its file (1-D UINT8, perhaps with zeros behind them), or, where the pipeline's
decoder has "input": "raw", its pixels as UINT8 height x width x channels (height x width for one channel)."""


def bytes_of(image: SourceImage) -> memoryview:
    """A view on an encoded image's bytes."""
    return memoryview(image) if isinstance(image, Buffer) else np.ascontiguousarray(image).data
