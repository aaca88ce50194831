"""Declares operations that move pixels, linearly or like a lens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import cv2
import numpy as np

from rocserve.backends.rocal import schema
from rocserve.backends.rocal.image import Extent, Image, Pixels, ResultExtent, cached_by_image_size, with_channels
from rocserve.backends.rocal.operations.base import (
    AmdForm,
    Call,
    Node,
    Operation,
    Tensor,
    Values,
    in_place,
)
from rocserve.backends.rocal.sampling import bilinear_places, nearest_places


def _flip(pixels: Pixels, horizontal: bool, vertical: bool) -> Pixels:
    if not horizontal and not vertical:
        return pixels
    # OpenCV's code 1 mirrors left to right, 0 top to bottom, -1 both.
    code = 1 if not vertical else -1 if horizontal else 0
    return with_channels(cast(Pixels, cv2.flip(pixels, code)))


def _fish_eye(pixels: Pixels) -> Pixels:
    """Apply a fish-eye lens: an ellipse that fills the image, black outside. With x and y from -1 to 1 and their
    distance d from the middle, a pixel is read at (d + 1 - sqrt(1 - d * d)) / 2 in the same direction."""
    height, width, channels = pixels.shape
    places, outside = _fish_eye_places(height, width)
    seen: Pixels = np.take(pixels.reshape(height * width, channels), places, axis=0)
    seen[outside] = 0
    return seen.reshape(height, width, channels)


@cached_by_image_size
def _fish_eye_places(height: int, width: int) -> tuple[Pixels, Pixels]:
    """Return for each pixel the index of its source pixel, counted along the rows, and whether it has no source
    pixel."""
    y = (np.arange(0, 2 * height, 2, dtype=np.float32) / np.float32(height) - np.float32(1))[:, np.newaxis]
    x = (np.arange(width, dtype=np.float32) * np.float32(2 / width) - np.float32(1))[np.newaxis]
    distance = np.sqrt(y * y + x * x)
    outside = distance > 1
    seen = (distance + np.float32(1) - np.sqrt(np.maximum(np.float32(1) - distance * distance, 0))) / np.float32(2)
    scale = seen / np.maximum(distance, np.float32(1e-9))
    # At the middle, where the direction is undefined, any direction gives the middle.
    middle_y, middle_x = scale * y + np.float32(1), np.where(distance > 0, scale * x, seen) + np.float32(1)
    # RPP's vector loop truncates half of an odd side. It processes four pixels if any of them is in the ellipse.
    whole = width - width % 4
    by_four = np.zeros((height, width), dtype=np.bool_)
    by_four[:, :whole] = np.repeat(~outside[:, :whole].reshape(height, whole // 4, 4).any(axis=2), 4, axis=1)
    half_height = np.where(by_four, np.float32(height // 2), np.float32(height / 2))
    half_width = np.where(by_four, np.float32(width // 2), np.float32(width / 2))
    rows = np.floor(middle_y * half_height).astype(np.intp)
    columns = np.floor(middle_x * half_width).astype(np.intp)
    places = rows * width + columns
    outside = outside | (places < 0) | (places >= height * width)
    return np.where(outside, 0, places).reshape(-1), outside.reshape(-1)


def _lens_correction(pixels: Pixels, camera_matrix: tuple[float, ...], distortion_coeffs: tuple[float, ...]) -> Pixels:
    """Correct a lens's distortion by Brown and Conrady's model. `camera_matrix` is [fx, cx, fy, cy], in pixels of
    the valid part; `distortion_coeffs` is [k1, k2, p1, p2, k3]."""
    return _undistorted_places(*pixels.shape[:2], camera_matrix, distortion_coeffs)(pixels)


@cached_by_image_size
def _undistorted_places(
    height: int, width: int, camera_matrix: tuple[float, ...], distortion_coeffs: tuple[float, ...]
) -> Callable[[Pixels], Pixels]:
    focal_x, centre_x, focal_y, centre_y = (np.float32(number) for number in camera_matrix)
    k1, k2, p1, p2, k3 = (np.float32(number) for number in distortion_coeffs)
    determinant = np.float32(1) / (focal_x * focal_y)
    depth = (focal_x * focal_y) * determinant
    x = np.arange(width, dtype=np.float32) * (focal_y * determinant) - focal_y * centre_x * determinant
    y = np.arange(height, dtype=np.float32) * (focal_x * determinant) - focal_x * centre_y * determinant
    x, y = (x / depth)[np.newaxis], (y / depth)[:, np.newaxis]
    squares = x * x + y * y
    radial = _fma(_fma(_fma(k3, squares, k2), squares, k1), squares, np.float32(1))
    twice = np.float32(2) * x * y
    tangential_x = _fma(p2, _fma(np.float32(2), x * x, squares), _fma(x, radial, p1 * twice))
    tangential_y = _fma(p1, _fma(np.float32(2), y * y, squares), _fma(y, radial, p2 * twice))
    columns, rows = _fma(focal_x, tangential_x, centre_x), _fma(focal_y, tangential_y, centre_y)
    return bilinear_places(rows, columns, height, width)


def _fma(factor: Pixels | np.float32, other: Pixels | np.float32, summand: Pixels | np.float32) -> Pixels:
    """Return factor * other + summand, rounded to FP32 once."""
    product = np.multiply(factor, other, dtype=np.float64)
    return cast(Pixels, np.add(product, summand, dtype=np.float64).astype(np.float32))


def _camera(camera_matrix: tuple[float, ...], distortion_coeffs: tuple[float, ...]) -> Values:
    if not camera_matrix[0] or not camera_matrix[2]:
        raise ValueError("fx and fy, the first and the third number of key 'camera_matrix', must not be 0")
    return {"camera_matrix": camera_matrix, "distortion_coeffs": distortion_coeffs}


def _amd_lens_correction(node: Node, call: Call) -> Tensor:
    # fn.lens_correction passes one camera, but rocAL needs a list with one per image.
    native = node.binding.native
    camera, distortion = native.CameraMatrix(), native.DistortionCoeffs()
    camera.fx, camera.cx, camera.fy, camera.cy = call.values["camera_matrix"]
    distortion.k1, distortion.k2, distortion.p1, distortion.p2, distortion.k3 = call.values["distortion_coeffs"]
    cameras, distortions = [camera] * node.batch_size, [distortion] * node.batch_size
    return native.lensCorrection(node.handle, node.images[0], cameras, distortions, False, node.layout, node.datatype)


def _transposed_extent(source: ResultExtent, swaps: bool) -> ResultExtent:
    if not swaps:
        return source
    return ResultExtent(*(Extent(extent.width, extent.height) for extent in (source.size, source.valid)))


def _amd_transpose(node: Node, call: Call) -> Tensor:
    planes = (0, 2, 1) if call.arguments["swaps"] else (0, 1, 2)
    return node.call("transpose", {"perm": planes if node.is_grey else call.values["perm"]})


def _part_refusal(arguments: Values, source: ResultExtent) -> str | None:
    """Refuse an operation after which rocAL does not know the valid part."""
    if source.size.is_known and source.size == source.valid:
        return None
    return "rocAL does this only with images that all have one size; resize to a fixed size before"


def _axes(perm: tuple[int, ...]) -> Values:
    if perm not in ((0, 1, 2), (1, 0, 2)):
        raise ValueError(
            f"key 'perm' must be [1, 0, 2] or [0, 1, 2], not {list(perm)}: channels stay the last axis; give"
            ' the output "layout": "NCHW" to have them first'
        )
    return {"swaps": perm == (1, 0, 2)}


def _move(
    image: Image,
    result: ResultExtent,
    as_float: bool,
    matrix: tuple[float, ...],
    interpolation_type: str,
    **size: int,
) -> Pixels:
    """Move pixels by a matrix; what lies outside is black. `matrix` is a, b, c, d, e, f of column = a x + b y + c,
    row = d x + e y + f. On both sides places are counted from the middle of the valid part, half its size rounded
    down. The moved image has the source's size and is the top left of the result."""
    source = image.valid
    return _affine_places(*source.shape[:2], matrix, interpolation_type == "LINEAR")(source)


def _moved_extent(source: ResultExtent, dest_width: int, dest_height: int, **others: Any) -> ResultExtent:
    return ResultExtent.whole(Extent(dest_height, dest_width) if dest_width and dest_height else source.size)


@cached_by_image_size
def _affine_places(height: int, width: int, matrix: tuple[float, ...], is_linear: bool) -> Callable[[Pixels], Pixels]:
    steps = tuple(float(np.float32(number)) for number in matrix)
    if is_linear:
        return bilinear_places(*_rows_and_columns(steps, height, width, lanes=8), height, width)
    rows, columns = _rows_and_columns(steps, height, width, lanes=4)
    return nearest_places(_nearest(rows), _nearest(columns), height, width)


def _rows_and_columns(matrix: tuple[float, ...], height: int, width: int, lanes: int) -> tuple[Pixels, Pixels]:
    """Return FP32 rows and columns, added up along a row as in RPP: by blocks of `lanes` columns, the rest one by
    one. If an image is turned by right angles, these roundings decide which pixels fall just outside of it."""
    blocks = width // lanes
    places = []
    for along, by_row, offset, half in (
        (matrix[3], matrix[4], matrix[5], height // 2),
        (matrix[0], matrix[1], matrix[2], width // 2),
    ):
        # The places in the first column are computed in 64 bits.
        from_middle = np.arange(height, dtype=np.float64) - height // 2
        start = (by_row * from_middle + offset - along * (width // 2) + half).astype(np.float32)
        step = np.float32(along)
        terms = np.empty((height, blocks, lanes), dtype=np.float32)
        if blocks:
            terms[:] = step * np.float32(lanes)
            terms[:, 0] = start[:, np.newaxis] + step * np.arange(lanes, dtype=np.float32)
        rest = np.full((height, width - blocks * lanes), step, dtype=np.float32)
        if rest.size:
            rest[:, 0] = start + step * np.float32(blocks * lanes)
        whole = np.add.accumulate(terms, axis=1).reshape(height, blocks * lanes)
        places.append(np.concatenate((whole, np.add.accumulate(rest, axis=1)), axis=1))
    return places[0], places[1]


def _nearest(places: Pixels) -> Pixels:
    """Round half to even, but in the last (width modulo 4) columns half away from zero."""
    nearest: Pixels = np.rint(places)
    rest = places[:, places.shape[1] - places.shape[1] % 4 :]
    nearest[:, places.shape[1] - places.shape[1] % 4 :] = np.copysign(np.floor(np.abs(rest) + np.float32(0.5)), rest)
    return nearest


def _by_angle(angle: float, **others: Any) -> Values:
    """Rotate by `angle` degrees counter-clockwise."""
    radians = float(np.float32(angle * 0.0174532925))
    cosine, sine = math.cos(radians), math.sin(radians)
    return {"matrix": (cosine, -sine, 0.0, sine, cosine, 0.0), **others}


def _by_matrix(matrix: tuple[float, ...], **others: Any) -> Values:
    """Read each pixel (x, y) at (m0 x + m2 y + m1, m3 x + m4 y + m5), where `matrix` is [m0, ..., m5]. The order is
    rocAL's, which exchanges the second and the third number on the way to the kernel."""
    first, second, third, *rest = matrix
    return {"matrix": (first, third, second, *rest), **others}


def _moved_refusal(arguments: Values, source: ResultExtent) -> str | None:
    sides = (arguments["dest_width"], arguments["dest_height"])
    if all(sides) and sides != (source.size.width, source.size.height):
        return "rocAL leaves a part of the result unwritten where dest_width and dest_height are not the source's"
    return _part_refusal(arguments, source)


_MOVING = AmdForm(fills_result=True, refusal=_moved_refusal)
_DESTINATION = {
    "dest_width": schema.size(0),
    "dest_height": schema.size(0),
    "interpolation_type": schema.choice("LINEAR", "NEAREST_NEIGHBOR", suffix="_INTERPOLATION")("LINEAR"),
}

OPERATIONS = (
    in_place("flip", _flip, dict.fromkeys(("horizontal", "vertical"), schema.switch(False, is_bindable=True))),
    Operation(
        "transpose",
        {"perm": schema.list_of(schema.size, (3,), "axes")},
        lambda image, result, as_float, swaps: with_channels(cv2.transpose(image.pixels)) if swaps else image.pixels,
        _transposed_extent,
        _axes,
        amd=AmdForm("transpose", _amd_transpose, fills_result=True, refusal=_part_refusal),
    ),
    Operation(
        "rotate",
        # The angle is required, because rocAL uses a random one as its default.
        {"angle": schema.number, **_DESTINATION},
        _move,
        _moved_extent,
        _by_angle,
        amd=_MOVING,
    ),
    Operation(
        "warp_affine",
        # The matrix is required, because rocAL's default of zeros shows the middle pixel everywhere.
        {"matrix": schema.list_of(schema.number, (6,), "numbers"), **_DESTINATION},
        _move,
        _moved_extent,
        _by_matrix,
        amd=_MOVING,
    ),
    in_place("fish_eye", _fish_eye, ignored_keys={"fill_value": schema.number(0)}),
    in_place(
        "lens_correction",
        _lens_correction,
        {
            "camera_matrix": schema.list_of(schema.number, (4,), "numbers [fx, cx, fy, cy]"),
            "distortion_coeffs": schema.list_of(schema.number, (5,), "numbers [k1, k2, p1, p2, k3]"),
        },
        arguments=_camera,
        amd=AmdForm("lens_correction", _amd_lens_correction),
    ),
)
