"""Every operation in a pipeline file, on a JPEG."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from support.pictures import jpeg
from support.rocal_operations import EXAMPLES

from rocserve.backends.rocal.decoding.decoder import Decoder
from rocserve.backends.rocal.decoding.options import ColorFormat
from rocserve.backends.rocal.engine import PipelineEngine
from rocserve.backends.rocal.image import Extent
from rocserve.backends.rocal.operations import OPERATIONS
from rocserve.backends.rocal.operations.base import Measurement
from rocserve.backends.rocal.pipeline import RANDOM_OPERATIONS, Layout, parse_pipeline
from rocserve.backends.rocal.plan import OutputFormat, output_extents
from rocserve.backends.rocal.schema import PipelineError
from rocserve.core.datatypes import DataType

BEFORE: dict[str, dict[str, Any]] = {"blend": {"operation": "flip", "vertical": 1, "name": "turned"}}
"""What stands before an operation."""


def documents(name: str) -> str:
    assert name in EXAMPLES, f"give EXAMPLES one for the operation '{name}'"
    step = {"operation": name, **EXAMPLES[name], "is_output": True}
    return json.dumps({"pipeline": [BEFORE[name], step] if name in BEFORE else [step], "mean_std_range": "pixel"})


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("color_format", ColorFormat)
@pytest.mark.parametrize("datatype", [DataType.UINT8, DataType.FP32, DataType.FP16])
def test_every_operation_serves_an_image(name: str, color_format: ColorFormat, datatype: DataType) -> None:
    operation = OPERATIONS[name]
    is_measurement = isinstance(operation, Measurement)
    if not is_measurement and operation.colour_only and color_format is ColorFormat.U8:
        with pytest.raises(PipelineError, match="needs colour"):
            parse_pipeline(documents(name), color_format.channels)
        return
    pipeline = parse_pipeline(documents(name), color_format.channels)
    formats = (OutputFormat(datatype, Layout.NHWC),)
    engine = PipelineEngine(pipeline, Decoder(color_format, pipeline.decoder), formats)
    (output,) = engine.run(jpeg(60, 40))
    if is_measurement:
        assert output.shape == operation.shape
        return
    assert output.dtype == datatype.numpy_dtype
    assert np.isfinite(output).all()
    assert output.any()
    for decoded in (Extent(None, None), Extent(80, 120)):
        (size,) = output_extents(pipeline, decoded)
        assert size is not None
        declared = formats[0].shape(size, color_format.channels)
        assert all(side in (-1, actual) for side, actual in zip(declared, output.shape, strict=True))
    # Of an image whose size is known, that of the result is known.
    assert -1 not in declared


def test_a_padded_image_keeps_its_size_through_operations_that_keep_it() -> None:
    steps: list[dict[str, Any]] = [
        {"operation": "resize", "resize_longer": 48},
        {"operation": "brightness", "brightness": 1, "brightness_shift": 40},
        {"operation": "blur"},
        {"operation": "flip", "horizontal": 1, "is_output": True},
    ]
    pipeline = parse_pipeline(json.dumps({"pipeline": steps}), channels=3)
    assert output_extents(pipeline, Extent(None, None)) == [Extent(48, 48)]
    engine = PipelineEngine(
        pipeline, Decoder(ColorFormat.RGB24, pipeline.decoder), (OutputFormat(DataType.UINT8, Layout.NHWC),)
    )
    (output,) = engine.run(jpeg(60, 40))
    assert output.shape == (48, 48, 3)
    # Of three to two the valid part is 48 x 32, at least 40 bright; below it all is black.
    assert (output[:32].max(axis=2) >= 40).all()
    assert not output[32:].any()


@pytest.mark.parametrize(
    ("operation", "key"),
    [
        ({"operation": "flip"}, "horizontal"),
        ({"operation": "flip"}, "vertical"),
        ({"operation": "crop_mirror_normalize", "crop": [20, 30]}, "mirror"),
        ({"operation": "resize_mirror_normalize", "resize_width": 24, "resize_height": 16}, "mirror"),
        ({"operation": "resize_crop_mirror", "resize_width": 24, "resize_height": 16}, "mirror"),
    ],
)
def test_flags_may_come_with_each_image(operation: dict[str, Any], key: str) -> None:
    document = {"pipeline": [{**operation, key: {"input": "TURN"}, "is_output": True}]}
    pipeline = parse_pipeline(json.dumps(document), channels=3)
    engine = PipelineEngine(
        pipeline, Decoder(ColorFormat.RGB24, pipeline.decoder), (OutputFormat(DataType.UINT8, Layout.NHWC),)
    )
    (plain,), (turned,) = (engine.run(jpeg(60, 40), {"TURN": flag}) for flag in (False, True))
    np.testing.assert_array_equal(turned, np.flip(plain, axis=0 if key == "vertical" else 1))
    assert not np.array_equal(turned, plain)


@pytest.mark.parametrize("name", RANDOM_OPERATIONS)
def test_random_operations_are_refused_as_random(name: str) -> None:
    document = {"pipeline": [{"operation": name, "is_output": True}]}
    text = (
        rf"pipeline\[0\]: key 'operation' must be one that gives the same result every time, .*random.*, not \"{name}\""
    )
    with pytest.raises(PipelineError, match=text):
        parse_pipeline(json.dumps(document), channels=3)
