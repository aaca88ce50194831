"""The engine on amd.rocal against the CPU engine, on a stand-in with rocAL's habits and the CPU engine's pixels."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.amd_rocal import engines, run_batch, run_one, setup_for
from support.pictures import jpeg
from support.rocal_operations import EXAMPLES

from rocserve.backends.rocal.decoding.decoder import Decoder
from rocserve.backends.rocal.decoding.image_file import ImageError
from rocserve.backends.rocal.decoding.options import ColorFormat
from rocserve.backends.rocal.image import PixelsError
from rocserve.backends.rocal.operations import OPERATIONS
from rocserve.backends.rocal.operations.base import Operation

GOLDEN = Path(__file__).resolve().parents[2] / "data" / "rocal-golden"
MANIFEST = json.loads((GOLDEN / "manifest.json").read_text())

RESIZE = {"operation": "Resize", "dest_width": 16, "dest_height": 8, "is_output": True}
pytestmark = pytest.mark.usefixtures("rocal")


def output(operation: str, **values: Any) -> dict[str, Any]:
    return {"operation": operation, "is_output": True, **values}


def assert_same(setup: Any, images: list[Any], **arguments: Any) -> list[np.ndarray]:
    """Check that both engines give the same results for each image; return those of amd.rocal."""
    engine, reference = engines(setup)
    given = []
    for row, image in enumerate(images):
        values = {name: np.asarray(column[row : row + 1]) for name, column in arguments.items()}
        results = run_one(engine, image, values)
        expected = run_one(reference, image, values)
        assert len(results) == len(expected)
        for result, right in zip(results, expected, strict=True):
            assert result.dtype == right.dtype
            np.testing.assert_array_equal(result, right)
        given.extend(results)
    return given


@pytest.mark.parametrize("name", sorted(MANIFEST["pipelines"]))
def test_golden_images(name: str) -> None:
    images = sorted({entry["image"] for entry in MANIFEST["entries"] if entry["pipeline"] == name})
    assert images
    assert_same(setup_for(MANIFEST["pipelines"][name]), [(GOLDEN / image).read_bytes() for image in images])


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 11])
def test_batches_of_all_sizes_are_whole_for_rocal(count: int) -> None:
    setup = setup_for([RESIZE], batch_size=5)
    engine, reference = engines(setup)
    images = [jpeg(30 + 7 * index, 90 - 5 * index) for index in range(count)]
    for order in (images, images[::-1]):
        (given,), failures = run_batch(engine, setup, order, [(8, 16, 3)])
        (expected,), _ = run_batch(reference, setup, order, [(8, 16, 3)])
        assert not failures
        np.testing.assert_array_equal(given, expected)


def test_a_bad_image_fails_alone() -> None:
    setup = setup_for([RESIZE])
    engine, reference = engines(setup)
    good, other = jpeg(50, 40), jpeg(70, 30)
    cut_off = good[: len(good) // 2]
    damaged = bytearray(good)
    damaged[-400:-300] = b"\x11" * 100
    images = [good, cut_off, other, b"GIF89a", bytes(damaged), b"", good]
    (given,), failures = run_batch(engine, setup, images, [(8, 16, 3)])
    (expected,), wrong = run_batch(reference, setup, images, [(8, 16, 3)])
    assert {1, 3, 5} <= set(failures)
    assert {row: str(error) for row, error in failures.items()} == {row: str(error) for row, error in wrong.items()}
    assert all(isinstance(error, ImageError) for error in failures.values())
    for row in set(range(len(images))) - set(failures):
        np.testing.assert_array_equal(given[row], expected[row])


def test_no_more_images_are_decoded_than_are_worked_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = engines(setup_for([RESIZE], batch_size=1, threads=2))
    in_memory, most = 0, 0
    decode = Decoder.decode

    def counted(decoder: Decoder, image: Any) -> Any:
        nonlocal in_memory, most
        in_memory += 1
        most = max(most, in_memory)
        return decode(decoder, image)

    def put(row: int, output: int, result: np.ndarray) -> None:
        nonlocal in_memory
        in_memory -= 1
        rows.append(row)

    monkeypatch.setattr(Decoder, "decode", counted)
    rows: list[int] = []
    images = [jpeg(30 + 7 * index, 40) for index in range(7)]
    assert list(engine.run([*images, b"GIF89a"], {}, put)) == [7]
    assert rows == list(range(7))
    assert most <= 2


def test_a_batch_of_bad_images_only_never_reaches_rocal() -> None:
    setup = setup_for([RESIZE])
    engine, _ = engines(setup)
    _, failures = run_batch(engine, setup, [b"no", b"image"], [(8, 16, 3)])
    assert set(failures) == {0, 1}


def test_formats_of_outputs() -> None:
    normalised = {"mean": [100, 110, 120], "std_dev": [50, 60, 70], "crop_width": 12, "crop_height": 6}
    steps = [
        RESIZE,
        output("CropMirrorNormalize", **normalised, dtype="FP32", layout="NCHW", inputs=["decoded"]),
        output("CropMirrorNormalize", **normalised, dtype="FP16", name="half"),
        output("brightness", brightness=1.3, brightness_shift=4, dtype="FP32", layout="NCHW"),
        output("Resize", dest_width=9, dest_height=9, layout="NCHW"),
        output("ImageSize"),
    ]
    results = assert_same(setup_for(steps), [jpeg(50, 40)])
    assert [str(result.dtype) for result in results] == ["uint8", "float32", "float16", "float32", "uint8", "int32"]
    assert [result.shape for result in results[:3]] == [(8, 16, 3), (3, 6, 12), (6, 12, 3)]


def test_the_kernel_that_exchanges_deviations_is_not_used_for_outputs(rocal: ModuleType) -> None:
    step = output("ResizeMirrorNormalize", dest_width=13, dest_height=9, mean=[0], std_dev=[2, 3, 4])
    assert_same(setup_for([step], batch_size=1), [jpeg(50, 40)])
    (tensor,) = rocal.contexts[0].outputs
    assert tensor.layout is rocal.types.NCHW


@pytest.mark.parametrize("color_format", list(ColorFormat))
def test_color_formats(color_format: ColorFormat) -> None:
    steps = [RESIZE, output("Resize", dest_width=5, dest_height=5, layout="NCHW", dtype="FP32")]
    images = [jpeg(50, 40), jpeg(40, 50, mode="L")]
    assert_same(setup_for(steps, color_format=color_format), images)


def png(width: int, height: int) -> bytes:
    encoded = io.BytesIO()
    pixels = np.random.default_rng(3).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(encoded, "PNG")
    return encoded.getvalue()


def test_images_that_rocal_cannot_read() -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    document = {"decoder": {"exif": True}, "pipeline": [RESIZE, output("ImageSize")]}
    assert_same(setup_for(document), [png(33, 21), jpeg(40, 30, mode="CMYK"), jpeg(40, 30, exif=turned.tobytes())])


def test_images_too_small_for_a_gpu_decoder() -> None:
    assert_same(setup_for([RESIZE]), [jpeg(9, 7), jpeg(63, 64), png(17, 3)])


@pytest.mark.parametrize(("width", "height", "resized"), [(1, 40, 7), (40, 1, 7), (5, 40, 7), (8, 40, 24), (2, 40, 99)])
def test_images_beside_which_rocal_would_read(width: int, height: int, resized: int) -> None:
    setup = setup_for([{**RESIZE, "dest_width": resized}])
    engine, _ = engines(setup)
    _, failures = run_batch(engine, setup, [png(width, height), jpeg()], [(8, resized, 3)])
    assert set(failures) == {0}
    assert isinstance(failures[0], PixelsError)
    assert "read other memory" in str(failures[0]) or "reads other memory" in str(failures[0])


def test_images_beside_which_rocal_would_read_by_a_side_that_follows() -> None:
    engine, _ = engines(setup_for([output("resize", resize_shorter=20)]))
    with pytest.raises(PixelsError, match="may read other memory where it resizes 5 columns to 20"):
        run_one(engine, png(5, 40))


def test_raw_pixels() -> None:
    setup = setup_for({"decoder": {"input": "raw"}, "pipeline": [RESIZE]})
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    assert_same(setup, [pixels, pixels[:, ::-1]])


def test_decoder_limits() -> None:
    image = jpeg(300, 200)
    kept = [output("Resize", dest_width=0, dest_height=10)]
    for limits in ({"max_width": 100, "max_height": 90}, {"max_width": 0, "max_height": 0}, {"max_width": 700}):
        (result,) = assert_same(setup_for({"decoder": limits, "pipeline": kept}), [image])
        assert result.shape[0] == 10


def test_an_image_that_is_larger_than_what_rocal_reserves() -> None:
    setup = setup_for({"decoder": {"max_width": 0, "max_height": 0}, "pipeline": [RESIZE]})
    engine, _ = engines(setup)
    with pytest.raises(ImageError, match="2100x10 pixels are more than the 2000x2000 that rocAL has memory for"):
        run_one(engine, jpeg(2100, 10))


def test_results_of_varying_sizes() -> None:
    crop = output("CropFixed", crop_width=70, crop_height=70, crop_pos_x=0, crop_pos_y=0)
    decoder = {"max_width": 0, "max_height": 0}
    results = assert_same(setup_for({"decoder": decoder, "pipeline": [crop]}), [jpeg(50, 90), jpeg(90, 50)])
    assert [result.shape for result in results] == [(70, 50, 3), (50, 70, 3)]


def test_only_the_valid_part_counts_after_a_crop() -> None:
    """rocAL marks less as valid than it resizes to; the next operation sees that part, with zeros next to it."""
    steps = [
        output("ResizeCropMirrorFixed", dest_width=40, dest_height=40, crop_w=30, crop_h=20, mirror=True),
        output("contrast", contrast=1.5, contrast_center=100),
        output("Resize", dest_width=10, dest_height=10, inputs=["decoded"]),
    ]
    first, second, _ = assert_same(setup_for(steps), [jpeg(200, 100)])
    assert first[30:, 35:].any()
    assert not second[20:].any()


def test_a_crop_that_stands_out_is_moved_or_refused() -> None:
    crop = output("CropFixed", crop_width=30, crop_height=30, crop_pos_x=20, crop_pos_y=500)
    known = [{"operation": "Resize", "dest_width": 40, "dest_height": 40}, crop]
    assert_same(setup_for(known), [jpeg()])
    setup = setup_for({"decoder": {"max_width": 0, "max_height": 0}, "pipeline": [crop]})
    engine, _ = engines(setup)
    (_,), failures = run_batch(engine, setup, [jpeg(50, 40), jpeg(40, 50)], [(30, 30, 3)])
    assert set(failures) == {1}
    assert isinstance(failures[1], PixelsError)
    assert "CropFixed: the crop from 20 to 50 exceeds its width of 40 pixels" in str(failures[1])


def test_flags_of_each_image() -> None:
    normalise = {"dest_width": 17, "dest_height": 9, "mean": [0], "std_dev": [2], "mirror": {"input": "MIRROR"}}
    steps = [output("ResizeMirrorNormalize", **normalise), output("flip", vertical={"input": "TURN"})]
    setup = setup_for(steps, batch_size=3)
    engine, reference = engines(setup)
    images = [jpeg(30 + index, 50) for index in range(7)]
    flags = {"MIRROR": np.array([0, 1, 1, 0, 1, 0, 0], dtype=bool), "TURN": np.array([0, 0, 1, 1, 1, 0, 1], dtype=bool)}
    shapes = [(9, 17, 3), (9, 17, 3)]
    given, failures = run_batch(engine, setup, images, shapes, flags)
    expected, _ = run_batch(reference, setup, images, shapes, flags)
    assert not failures
    for result, right in zip(given, expected, strict=True):
        np.testing.assert_array_equal(result, right)


WRITTEN = {
    **EXAMPLES,
    "ResizeMirrorNormalize": {**EXAMPLES["ResizeMirrorNormalize"], "mirror": True},
    "ResizeCropMirrorFixed": {**EXAMPLES["ResizeCropMirrorFixed"], "mirror": True},
    # To the source's size at most.
    "warp_affine": {"matrix": [0.9, 0.1, 0.2, 0.8, 1, 2], "interpolation_type": "NEAREST_NEIGHBOR"},
    "blend": {"ratio": 0.3, "inputs": ["before", "other"]},
}


REFUSED = ("ImageSize", "blur", "normalize")
WHOLE_LEVELS = (
    "CropResizeFixed", "ResizeCropMirrorFixed", "resize", "resize_crop", "resize_crop_mirror", "roi_resize",
)  # fmt: skip
"""Operations that rocAL lacks for FP32, or has with another interpolation than here; their levels are rounded like
UINT8's."""


@pytest.mark.parametrize("datatype", ["UINT8", "FP32"])
@pytest.mark.parametrize(
    ("name", "color_format"),
    [
        (name, color_format)
        for name, operation in sorted(OPERATIONS.items())
        for color_format in (ColorFormat.RGB24, ColorFormat.U8)
        if name not in REFUSED
        if not (isinstance(operation, Operation) and operation.colour_only and color_format is ColorFormat.U8)
    ],
)
def test_every_operation(name: str, datatype: str, color_format: ColorFormat) -> None:
    def setup(datatype: str) -> Any:
        steps = [
            {"operation": "Resize", "dest_width": 60, "dest_height": 40, "name": "other"},
            {"operation": "brightness_fixed", "brightness": 0.8, "name": "before"},
            output(name, **WRITTEN[name], dtype=datatype, layout="NCHW"),
        ]
        return setup_for(steps, color_format=color_format)

    engine, reference = engines(setup(datatype))
    if name in WHOLE_LEVELS:
        _, reference = engines(setup("UINT8"))
    (given,), (expected,) = run_one(engine, jpeg(60, 40)), run_one(reference, jpeg(60, 40))
    assert given.dtype == np.dtype("float32" if datatype == "FP32" else "uint8")
    np.testing.assert_array_equal(given, expected)


@pytest.mark.parametrize("color_format", [ColorFormat.RGB24, ColorFormat.U8])
def test_unrounded_levels_of_resizing(color_format: ColorFormat) -> None:
    steps = [
        output("Resize", dest_width=13, dest_height=9, dtype="FP32"),
        output("resize", resize_shorter=12, dtype="FP32", layout="NCHW", inputs=["decoded"]),
    ]
    first, second = assert_same(setup_for(steps, color_format=color_format), [jpeg(60, 40)])
    assert (first % 1).any() and (second % 1).any()
