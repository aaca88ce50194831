"""A rocAL pipeline as far as its callers see it: its queue of images, its ring of results, its habits."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from rocal_pybind import types
from rocal_pybind.memory import Address
from rocserve.backends.rocal.image import Image

GARBAGE = 173
"""The value of memory that nobody has written."""

_NUMPY_TYPES = {types.UINT8: np.dtype(np.uint8), types.FLOAT: np.dtype(np.float32)}


class Hang(BaseException):
    """Raised where rocAL would wait for ever with Python's global lock held."""


class RocalError(Exception):
    """What rocAL's C++ throws and keeps as the pipeline's error message."""


def hang(why: str) -> None:
    if os.environ.get("ROCAL_STAND_IN_BLOCKS"):
        time.sleep(3600)
    raise Hang(why)


@dataclass
class Tensor:
    """A node's image in the graph, of the largest size."""

    context: Context
    height: int
    width: int
    channels: int
    layout: types.RocalTensorLayout
    datatype: types.RocalTensorOutputType
    compute: Callable[[list[Image]], Image] | None
    """Makes this node's image from the sources' images, for each image of a batch; None for the loader's tensor."""
    sources: tuple[Tensor, ...] = ()
    regions: np.ndarray | None = None
    """The regions of the images that were loaded last; the loader's tensor alone has them."""

    def copy_roi(self, array: np.ndarray) -> None:
        assert self.regions is not None and array.nbytes == self.regions.nbytes
        array.view(np.uint32).reshape(self.regions.shape)[...] = self.regions

    @property
    def dimensions(self) -> list[int]:
        count, height, width, channels = self.context.batch_size, self.height, self.width, self.channels
        if self.layout is types.NCHW:
            return [count, channels, height, width]
        return [count, height, width, channels]


@dataclass
class OutputTensor:
    """rocalTensor, as getOutputTensors gives it: it shows the ring's front."""

    tensor: Tensor
    data: np.ndarray
    regions: np.ndarray

    def dimensions(self) -> list[int]:
        return self.tensor.dimensions

    def dtype(self) -> str:
        return _NUMPY_TYPES[self.tensor.datatype].name

    def layout(self) -> str:
        return self.tensor.layout.name

    def copy_data(self, array: np.ndarray) -> None:
        # rocAL writes this many bytes to the array's address, whatever the array is.
        assert isinstance(array, np.ndarray), "copy_data takes an array"
        assert array.flags.c_contiguous and array.flags.writeable, "copy_data writes beside a strided array"
        assert array.shape == self.data.shape, f"copy_data writes {self.data.shape}, the array is {array.shape}"
        assert array.dtype == self.data.dtype, f"copy_data writes {self.data.dtype}, the array is {array.dtype}"
        array[...] = self.data

    def copy_roi(self, array: np.ndarray) -> None:
        assert array.flags.c_contiguous and array.flags.writeable
        assert array.nbytes == self.regions.nbytes, f"copy_roi writes {self.regions.nbytes} bytes, not {array.nbytes}"
        array.view(np.uint32).reshape(self.regions.shape)[...] = self.regions


@dataclass
class Feed:
    address: Address
    size: int
    """Bytes of the largest image."""
    height: int
    width: int


@dataclass
class Context:
    batch_size: int
    depth: int
    threads: int
    error: str = ""
    loader: Tensor | None = None
    mode: types.RocalExternalSourceMode | None = None
    outputs: list[Tensor] = field(default_factory=list)
    queue: deque[Feed] = field(default_factory=deque)
    eos: bool = False
    ended: bool = False
    """Whether all images before the end of the feed have been processed."""
    ring: deque[list[OutputTensor]] = field(default_factory=deque)
    last: list[OutputTensor] = field(default_factory=list)
    """The outputs of the last batch: what a reader finds if the ring is empty."""
    processing: bool = False
    first_run: bool = True
    batches_until_death: int | None = None
    slips: bool = False
    labels: Address | None = None
    memory: np.ndarray | None = None
    """The loader's memory, which every batch overwrites."""

    def verify(self) -> None:
        if self.loader is None:
            raise RocalError("At least one loader needs to be created in the pipeline")
        if not self.outputs:
            raise RocalError("No output tensors are there, cannot create the pipeline")
        self.processing = True

    def feed(self, images: list[Feed], eos: bool) -> None:
        if not self.processing:
            raise RocalError("Loader module does not exist")
        self.eos = eos
        self.queue.extend(images)

    def run(self) -> types.RocalStatus:
        if not self.processing or (self.ended and not self.ring):
            return types.RUNTIME_ERROR
        self._wait_for_output()
        if self.first_run:
            self.first_run = False
        elif self.ring:
            self.ring.popleft()
        return types.RUNTIME_ERROR if self.ended and not self.ring else types.OK

    def output_tensors(self) -> list[OutputTensor]:
        self._wait_for_output()
        return self.ring[0] if self.ring else self.last or [self._output(tensor, []) for tensor in self.outputs]

    def _wait_for_output(self) -> None:
        while len(self.ring) < self.depth and len(self.queue) >= self.batch_size and self.processing and not self.ended:
            self._process()
            # Images that are fed after the end are never processed.
            self.ended = self.eos and not self.queue
        if not self.ring and self.processing and not self.ended:
            hang(f"{len(self.queue)} of {self.batch_size} images are fed, and nobody feeds more")

    def _process(self) -> None:
        if self.batches_until_death == 0:
            # The processing thread has thrown; the reader wakes and finds what is there.
            self.processing = False
            return
        if self.batches_until_death is not None:
            self.batches_until_death -= 1
        assert self.loader is not None and self.labels is not None
        self.labels.read(4 * self.batch_size)
        feeds = [self.queue.popleft() for _ in range(self.batch_size)]
        if self.slips:
            self.slips = False
            self.queue.appendleft(feeds.pop())
            feeds.insert(0, feeds[0])
        batch = [self._load(index, feed) for index, feed in enumerate(feeds)]
        self.loader.regions = np.array([(0, 0, *image.valid.shape[1::-1]) for image in batch], np.uint32)
        images: dict[int, list[Image]] = {id(self.loader): batch}
        self.last = [self._output(tensor, self._images(tensor, images)) for tensor in self.outputs]
        self.ring.append(self.last)

    def _images(self, tensor: Tensor, known: dict[int, list[Image]]) -> list[Image]:
        if id(tensor) not in known:
            sources = zip(*(self._images(source, known) for source in tensor.sources), strict=True)
            assert tensor.compute is not None
            known[id(tensor)] = [tensor.compute(list(images)) for images in sources]
        return known[id(tensor)]

    def _output(self, tensor: Tensor, images: list[Image]) -> OutputTensor:
        shape = (self.batch_size, tensor.height, tensor.width, tensor.channels)
        data = np.full(shape, GARBAGE, dtype=_NUMPY_TYPES[tensor.datatype])
        regions = np.zeros((self.batch_size, 4), dtype=np.uint32)
        for index, image in enumerate(images):
            pixels = image.padded
            height, width = pixels.shape[:2]
            data[index, :height, :width] = pixels[: tensor.height, : tensor.width]
            regions[index, 2:] = image.valid.shape[1::-1]
        if self.threads != 1:
            # RPP's kernels write past an image's end into the next image, which another thread may already have
            # finished.
            data[1:, 0, :3] = GARBAGE
        if tensor.layout is types.NCHW:
            data = np.ascontiguousarray(data.transpose(0, 3, 1, 2))
        return OutputTensor(tensor, data, regions)

    def _load(self, index: int, feed: Feed) -> Image:
        loader = self.loader
        assert loader is not None
        if self.memory is None:
            shape = (self.batch_size, loader.height, loader.width, loader.channels)
            self.memory = np.full(shape, GARBAGE, dtype=np.uint8)
        memory = self.memory[index]
        memory.reshape(-1)[: feed.size] = feed.address.read(feed.size)
        return Image.whole(memory[: feed.height, : feed.width].copy())
