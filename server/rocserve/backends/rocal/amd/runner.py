"""Runs whole batches through one rocAL pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rocserve.backends.rocal.amd.feeding import Canvas, Feeder
from rocserve.backends.rocal.amd.graph import Graph, GraphSettings
from rocserve.backends.rocal.amd.outputs import BatchOutput, OutputReader
from rocserve.backends.rocal.amd.watchdog import limited_to

_LONGEST_RUN_SECONDS = 120.0
"""Far more than any batch takes. A rocAL pipeline that waits for something will not stop."""


class BrokenPipelineError(RuntimeError):
    """A rocAL pipeline that can run nothing any more; the text is rocAL's reason."""


class PipelineRunner:
    """One rocAL pipeline, which has a fixed batch size. One thread at a time."""

    def __init__(self, settings: GraphSettings, graph: Graph, canvas: Canvas) -> None:
        self._settings = settings
        self._graph = graph
        self._feeder = Feeder(settings, graph, canvas)
        self._readers = [OutputReader(settings, step, graph.batch_size) for step in settings.plan.image_outputs]
        self._canvas = canvas
        self._regions = np.zeros((graph.batch_size, 4), dtype=np.uint32)
        """x, y, width, height of what was loaded last."""
        self._started = False

    @property
    def batch_size(self) -> int:
        return self._graph.batch_size

    def run(self, count: int) -> Sequence[BatchOutput]:
        """The outputs that are images, for the canvas's first `count` images; good until the next run.

        Raises:
            BrokenPipelineError: rocAL failed. What it gave may be an earlier batch's, so nothing of it is returned.
        """
        with limited_to(_LONGEST_RUN_SECONDS):
            fault = self._feeder.feed(count)
            if fault is not None:
                raise BrokenPipelineError(fault)
            if not self._started:
                # Waits for the first batch, and keeps it. Every later call lets go of a batch, see below.
                self._advance()
                self._started = True
            tensors = self._settings.binding.native.getOutputTensors(self._graph.handle)
            outputs = self._read(tensors)
            # rocAL hands out old memory when its processing thread has died, and says nothing. Only the next call of
            # run tells; it lets go of the batch that has been read and waits for none.
            self._advance()
            self._check_order(count)
        return outputs

    def _read(self, tensors: Sequence[object]) -> Sequence[BatchOutput]:
        if len(tensors) != len(self._readers):
            raise BrokenPipelineError(f"expected {len(self._readers)} output tensors, got {len(tensors)}")
        try:
            return [reader.read(tensor) for reader, tensor in zip(self._readers, tensors, strict=True)]
        except RuntimeError as error:
            raise BrokenPipelineError(str(error)) from error

    def _check_order(self, count: int) -> None:
        """rocAL's loader does not look whether there is an image when it is woken. Woken too early, it takes what lies
        on its stack for one, at best the image before, and all later images move by one place, to other requests."""
        self._graph.source.copy_roi(self._regions)
        if [(height, width) for _, _, width, height in self._regions.tolist()] != self._canvas.sizes_of(
            count, self.batch_size
        ):
            raise BrokenPipelineError("it worked on other images than it was given")

    def _advance(self) -> None:
        binding = self._settings.binding
        if self._graph.pipeline.rocal_run() != binding.types.OK:
            raise BrokenPipelineError(binding.fault(self._graph.handle) or "its processing thread ended")
