"""The model on any engine: the cause of a failure, the images that it affects, and concurrent callers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from support import pictures
from support.waiting import PATIENCE_SECONDS

from rocserve.backends.base import Batch, LoadedModel
from rocserve.backends.rocal.backend import RocalModel
from rocserve.backends.rocal.decoding.image_file import ImageError, SourceImage
from rocserve.backends.rocal.decoding.options import ColorFormat
from rocserve.backends.rocal.engine import Arguments, CpuEngine, EngineSetup, Put
from rocserve.backends.rocal.image import PixelsError
from rocserve.backends.rocal.interface import join
from rocserve.backends.rocal.pipeline import parse_pipeline
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode, unavailable
from rocserve.core.model_config import ModelConfig
from rocserve.core.tensors import Tensor, encode_bytes_elements

Served = Callable[..., LoadedModel]

RESIZE = b'{"pipeline": [{"operation": "Resize", "dest_width": 16, "dest_height": 8, "is_output": true}]}'


class WholeBatchEngine:
    """Returns each image's length as all its levels, and the faults with which it was made."""

    def __init__(self, faults: Mapping[int, Exception]) -> None:
        self._faults = faults
        self.closed = False

    def run(self, images: Sequence[SourceImage], arguments: Arguments, put: Put) -> Mapping[int, Exception]:
        assert not arguments
        for row, image in enumerate(images):
            put(row, 0, np.full((8, 16, 3), len(image) % 256, np.uint8))
        return self._faults

    def close(self) -> None:
        self.closed = True


def model_over(engine: WholeBatchEngine, max_batch_size: int = 8) -> RocalModel:
    pipeline = parse_pipeline(RESIZE, 3)
    interface = join(pipeline, ModelConfig(name="m", max_batch_size=max_batch_size), 3)
    setup = EngineSetup(
        model_name="m",
        pipeline=pipeline,
        color_format=ColorFormat.RGB24,
        formats=tuple(output.format for output in interface.outputs),
        batch_size=max_batch_size,
        threads=1,
        device=None,
    )
    return RocalModel(engine, setup, interface)


def batch(images: Sequence[bytes], sizes: Sequence[int]) -> Batch:
    tensor = Tensor("encoded", DataType.BYTES, (len(images), 1), encode_bytes_elements(images))
    return Batch({"encoded": tensor}, ("image",), tuple(sizes))


def test_rows_come_back_in_their_order() -> None:
    engine = WholeBatchEngine({})
    model = model_over(engine)
    result = model.execute(batch([b"1", b"333", b"22"], [1, 2]))
    assert not result.failures
    np.testing.assert_array_equal(np.asarray(result.outputs["image"])[:, 0, 0, 0], [1, 3, 2])
    assert not model.execute(Batch(batch([b"1"], [1]).inputs, (), (1,))).outputs
    model.close()
    assert engine.closed


@pytest.mark.parametrize(
    ("fault", "code", "text"),
    [
        (ImageError("it is empty"), StatusCode.INVALID_ARGUMENT, "input 'encoded' cannot be decoded: it is empty"),
        (PixelsError("too flat"), StatusCode.INVALID_ARGUMENT, "input 'encoded' cannot be processed: too flat"),
        (RuntimeError("a kernel failed"), StatusCode.INTERNAL, "could not be processed: a kernel failed"),
        (MemoryError(), StatusCode.INTERNAL, "could not be processed: MemoryError"),
        (unavailable("gone"), StatusCode.UNAVAILABLE, "gone"),
    ],
)
def test_only_the_request_with_a_fault_gets_its_error(fault: Exception, code: StatusCode, text: str) -> None:
    model = model_over(WholeBatchEngine({2: fault}))
    result = model.execute(batch([b"1", b"22", b"333", b"1"], [1, 2, 1]))
    assert list(result.failures) == [1]
    assert result.failures[1].code is code
    assert text in result.failures[1].text
    assert result.failures[1].text.startswith("image 1 of") or code is StatusCode.UNAVAILABLE
    alone = model_over(WholeBatchEngine({0: fault})).execute(batch([b"1"], [1]))
    assert alone.failures[0].text.startswith("the image in") or code is StatusCode.UNAVAILABLE


def test_the_first_fault_of_a_request_counts() -> None:
    faults = {3: ImageError("late"), 1: ImageError("early")}
    result = model_over(WholeBatchEngine(faults)).execute(batch([b"1"] * 4, [4]))
    assert result.failures[0].text == "image 1 of input 'encoded' cannot be decoded: early"


def test_a_fault_of_the_warm_up_is_an_error_of_the_load() -> None:
    with pytest.raises(ServeError, match="could not be processed: no device"):
        model_over(WholeBatchEngine({0: RuntimeError("no device")})).warm_up([])


def test_instances_share_the_threads_and_nothing_else(served: Served) -> None:
    model = served(RESIZE, max_batch_size=8, parameters={"threads": "3"}, instance_count=4)
    batches = [[pictures.jpeg(40 + 8 * index + place, 30) for place in range(5)] for index in range(8)]
    expected = [np.asarray(model.execute(batch(images, [5])).outputs["image"]) for images in batches]

    def run(index: int) -> np.ndarray[Any, Any]:
        return np.asarray(model.execute(batch(batches[index % 8], [2, 3])).outputs["image"])

    with ThreadPoolExecutor(4) as instances:
        for index, rows in enumerate(instances.map(run, range(40))):
            np.testing.assert_array_equal(rows, expected[index % 8])
    model.close()


def test_images_of_a_batch_are_worked_on_side_by_side(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    model = served(RESIZE, max_batch_size=8, parameters={"threads": "3"})
    images = [pictures.jpeg(40 + place, 30) for place in range(3)]
    expected = np.asarray(model.execute(batch(images, [3])).outputs["image"])
    # Nobody passes it before three have reached it.
    barrier = threading.Barrier(3, timeout=PATIENCE_SECONDS)
    run = CpuEngine.run_image

    def run_together(engine: CpuEngine, *arguments: Any) -> list[np.ndarray[Any, Any]]:
        barrier.wait()
        return run(engine, *arguments)

    monkeypatch.setattr(CpuEngine, "run_image", run_together)
    result = model.execute(batch(images, [3]))
    assert not result.failures
    np.testing.assert_array_equal(result.outputs["image"], expected)
    model.close()


@pytest.mark.parametrize("threads", ["1", "3"])
@pytest.mark.parametrize("fault", [RuntimeError("a kernel failed"), MemoryError("no memory"), KeyError("x")])
def test_what_nobody_foresaw_fails_one_image_too(
    served: Served, monkeypatch: pytest.MonkeyPatch, threads: str, fault: Exception
) -> None:
    model = served(RESIZE, max_batch_size=8, parameters={"threads": threads})
    images = [pictures.jpeg(40 + place, 30) for place in range(4)]
    expected = np.asarray(model.execute(batch(images, [4])).outputs["image"])
    run = CpuEngine.run_image

    def run_or_fail(engine: CpuEngine, encoded: Any, *arguments: Any) -> list[np.ndarray[Any, Any]]:
        if bytes(encoded) == images[2]:
            raise fault
        return run(engine, encoded, *arguments)

    monkeypatch.setattr(CpuEngine, "run_image", run_or_fail)
    result = model.execute(batch(images, [1, 1, 1, 1]))
    assert list(result.failures) == [2]
    assert result.failures[2].code is StatusCode.INTERNAL
    np.testing.assert_array_equal(np.delete(result.outputs["image"], 2, axis=0), np.delete(expected, 2, axis=0))
    model.close()
