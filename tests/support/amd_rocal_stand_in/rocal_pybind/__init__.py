"""rocal_pybind: the native part of amd.rocal, in Python. See the README next to the packages."""

# ruff: noqa: F401, F403, F405

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rocal_pybind import types
from rocal_pybind.context import Context, Feed, Hang, OutputTensor, RocalError, Tensor
from rocal_pybind.memory import Address
from rocal_pybind.nodes import *

contexts: list[Context] = []
"""All contexts that were made, for tests."""


class ROIxywh:
    __slots__ = ("h", "w", "x", "y")

    def __init__(self) -> None:
        self.x = self.y = self.w = self.h = 0

    def __setattr__(self, name: str, value: Any) -> None:
        if type(value) is not int or value < 0:
            raise TypeError(f"ROIxywh.{name} is unsigned, not {value!r}")
        super().__setattr__(name, value)


@dataclass
class RocalShardingInfo:
    last_batch_policy: types.RocalLastBatchPolicy
    pad_last_batch_repeated: bool
    stick_to_shard: bool
    shard_size: int


def rocalCreate(batch_size, mode, gpu, threads, depth, datatype):  # noqa: N802
    if type(batch_size) is not int or batch_size < 1 or not isinstance(mode, types.RocalProcessMode):
        return None
    if depth < 2 or mode is types.GPU:
        return None  # There is no GPU here.
    context = Context(batch_size, depth, threads)
    contexts.append(context)
    return context


def getStatus(context):  # noqa: N802
    if context is None:
        return types.CONTEXT_INVALID
    return types.RUNTIME_ERROR if context.error else types.OK


def rocalGetErrorMessage(context):  # noqa: N802
    return context.error


def setSeed(seed):  # noqa: N802
    return types.OK


def createFloatParameter(value):  # noqa: N802
    return FloatParameter(value)


def createIntParameter(value):  # noqa: N802
    if not isinstance(value, int):
        raise TypeError("incompatible function arguments")
    return IntParameter(value)


def externalFileSource(  # noqa: N802
    context, color, is_output, shuffle, loop, policy, max_width, max_height, decoder, mode, sharding
):
    if not max_width or not max_height:
        context.error = "Invalid input max width and height"
        return None
    if not isinstance(color, types.RocalImageColor) or not isinstance(sharding, RocalShardingInfo):
        raise TypeError("incompatible function arguments")
    grey = color is types.GRAY
    layout = types.NCHW if grey else types.NHWC
    context.mode = mode
    context.loader = Tensor(context, max_height, max_width, 1 if grey else 3, layout, types.UINT8, None)
    return context.loader


def setOutputs(context, count, tensors):  # noqa: N802
    if len(tensors) != count or not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise TypeError("incompatible function arguments")
    if len({id(tensor) for tensor in tensors}) != count:
        raise AssertionError("a tensor is set as an output twice")
    context.outputs.extend(tensors)


def rocalVerify(context):  # noqa: N802
    try:
        context.verify()
    except RocalError as error:
        context.error = str(error)
        return types.RUNTIME_ERROR
    return types.OK


def externalSourceFeedInput(  # noqa: N802
    context, names, labels, arrays, regions, max_width, max_height, channels, mode, layout, eos
):
    if not isinstance(labels, np.ndarray) or not isinstance(arrays, list) or names != []:
        raise TypeError("incompatible function arguments: labels are an array, buffers a list")
    if not isinstance(layout, types.RocalTensorLayout) or type(eos) is not bool:
        raise TypeError("incompatible function arguments")
    assert labels.dtype == np.int32 and labels.size <= context.batch_size, "labels are read as int32, one an image"
    assert mode is context.mode is types.EXTSOURCE_RAW_UNCOMPRESSED, "the mode is fixed when the source is made"
    context.labels = Address(labels)
    feeds = []
    for array, region in zip(arrays, regions, strict=True):
        assert isinstance(array, np.ndarray) and array.dtype == np.uint8, "other arrays are copied to memory that dies"
        assert array.flags.c_contiguous, "the address of a strided array says nothing"
        feeds.append(Feed(Address(array), max_width * max_height * channels, region.h, region.w))
    try:
        context.feed(feeds, eos)
    except RocalError as error:
        context.error = str(error)


def rocalRun(context):  # noqa: N802
    return context.run()


def getOutputTensors(context):  # noqa: N802
    return list(context.output_tensors())


def slip(context: Context) -> None:
    """For tests: the next batch repeats an image, and the images after it are late by one, as when rocAL wakes too
    early."""
    context.slips = True


def break_after(context: Context, batches: int) -> None:
    """For tests: the pipeline's processing thread dies after this many more batches."""
    context.batches_until_death = batches
