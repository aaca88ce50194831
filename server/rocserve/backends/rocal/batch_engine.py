"""What runs a pipeline over a batch: the seam between the model, which knows requests, and its engines, which do not.

There are two engines: `threaded_engine.py`, which works image by image on the CPU, and `amd/`, which hands whole
batches to rocAL. `load` in `backend.py` chooses one (`engine_choice.py`) and makes it of an EngineSetup; the folder
`amd` gives its own by `make_engine(setup: EngineSetup) -> BatchEngine` in `amd/engine.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rocserve.backends.rocal.decoding.options import ColorFormat, DecoderOptions
from rocserve.backends.rocal.decoding.source import SourceImage
from rocserve.backends.rocal.engine import OutputFormat
from rocserve.backends.rocal.pipeline import Pipeline

Arguments = Mapping[str, np.ndarray[Any, Any]]
"""By the names of the pipeline's inputs: one value for each image, [images], in the pipeline input's datatype."""


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """All that an engine is made of."""

    model_name: str
    pipeline: Pipeline
    decoder: DecoderOptions
    """The pipeline's, with `max_pixels` lowered to what the model's parameter allows."""
    color_format: ColorFormat
    formats: tuple[OutputFormat, ...]
    """How each output is handed out, in the order of the steps with is_output."""
    shapes: tuple[tuple[int, ...], ...]
    """Of one image of each output; -1 for a side that differs from image to image."""
    batch_size: int
    """How many images a batch usually has at most: max_batch_size, or 1 without batching. A single request of a model
    without batching may still bring more."""
    threads: int
    """How many CPU threads the engine may keep busy with the images of a batch."""
    device: int | None
    """The GPU's number as the model's configuration counts them; None = on the CPU. A worker sees only that one GPU."""


class BatchEngine(Protocol):
    """A pipeline ready to run. Several threads may call it at once (one for each instance of the model)."""

    def run(
        self, images: Sequence[SourceImage], arguments: Arguments, outputs: Sequence[np.ndarray[Any, Any] | None]
    ) -> Mapping[int, Exception]:
        """Write each image's results to its row of `outputs`; say which images failed, by their places.

        `outputs` has, in the pipeline's order, one array of [images, *shape] a output, None where it is not wanted. All
        shapes are fixed. One bad image never harms another: its rows may hold anything, all other rows are right.

        A failure is an ImageError, a PixelsError or an ArgumentError where the client is at fault, with a text that
        goes on after "image 3 of input 'X'"; any other exception where the engine is. What is raised instead of
        returned fails the whole batch.
        """

    def run_one(self, image: SourceImage, arguments: Arguments) -> Sequence[np.ndarray[Any, Any]]:
        """All results for one image, whose sizes may be its own; `arguments` have one row.

        Raises:
            Exception: the image failed, in the words of `run`.
        """

    def close(self) -> None:
        """End its threads and give back what it holds; nothing is called after it."""
