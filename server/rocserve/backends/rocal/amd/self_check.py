"""Compares rocAL with the CPU engine on one picture, when a model is loaded.

Another version of rocAL, a driver or a GPU that the engine was not written against shows here, and not in a model's
answers that are worse than they should be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np

from rocserve.backends.rocal.batch_engine import BatchEngine, EngineSetup
from rocserve.backends.rocal.decoding.decoder import Decoder
from rocserve.backends.rocal.decoding.options import DecoderOptions, InputKind
from rocserve.backends.rocal.engine import PipelineEngine
from rocserve.backends.rocal.image import Pixels

RAW_PIXELS = DecoderOptions(input=InputKind.RAW)
"""How the picture is taken in by both."""

_TOLERANCE = 0.05
"""Of the deviation of an output's values. Kernels that round otherwise differ by a hundredth of it; exchanged channels,
another part of the picture or an older one by a third and more."""


def picture(height: int, width: int, channels: int) -> Pixels:
    """Something to see everywhere, and nothing twice: soft spots of all colours, the same each time."""
    spots = np.random.default_rng(7).integers(0, 256, (6, 8, channels), dtype=np.uint8)
    return cv2.resize(spots, (width, height), interpolation=cv2.INTER_CUBIC).reshape(height, width, channels)


def differences(engine: BatchEngine, setup: EngineSetup, pixels: Pixels) -> Sequence[str]:
    """How each output differs from the CPU engine's; nothing for those that agree.

    `engine` takes raw pixels. All flags that come with an image are false.
    """
    arguments = {one.name: np.zeros(1, dtype=one.datatype.numpy_dtype) for one in setup.pipeline.inputs}
    given = engine.run_one(pixels, arguments)
    reference = PipelineEngine(setup.pipeline, Decoder(setup.color_format, RAW_PIXELS), setup.formats)
    expected = reference.run(pixels, {name: values[0] for name, values in arguments.items()})
    texts = (_difference(output, *pair) for output, pair in enumerate(zip(given, expected, strict=True)))
    return [text for text in texts if text is not None]


def _difference(output: int, given: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> str | None:
    if given.shape != expected.shape:
        return f"output {output} has shape {list(given.shape)}, not {list(expected.shape)}"
    right = expected.astype(np.float64)
    mean = float(np.mean(np.abs(given - right)))
    # Where all values are nearly the same there is nothing to measure by but themselves.
    scale = float(np.std(right)) or float(np.mean(np.abs(right))) or 1.0
    if mean <= _TOLERANCE * scale:
        return None
    return f"output {output} differs by {mean:.3g} on average, where its values have a deviation of {scale:.3g}"
