"""Draws pictures of circles, squares and triangles on busy backgrounds, and writes the truth about them.

    python clients/examples/shapes.py --count 12 --seed 7 --out build/shapes

The same seed gives the same pictures. The shapes differ in colour, size and rotation; they overlap, are cut off by the
frame, shaded, blurred and noisy. The background imitates a photograph out of focus: clouds of colour, soft blobs,
stripes and hairs.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

LABELS = ("circle", "square", "triangle")

LONG_SIDE = (256, 640)
"""A picture's long side in pixels; the short side is at least ASPECT of it."""
ASPECT = 0.6
MOST_SHAPES = 7
DIAMETER = (0.11, 0.48)
"""Diameter of the circle around a shape, as a share of the picture's short side."""
LEAST_VISIBLE = 0.65
"""The share of each shape that later shapes must leave uncovered."""
LEAST_INSIDE = 0.85
"""The share of each shape that must lie in the picture."""
LEAST_CONTRAST = 70.0
"""Between a shape's colour and the mean of its background, as a distance in RGB."""
OVERSAMPLING = 4
PLACEMENT_ATTEMPTS = 20

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """A shape's name, and the pixels that it spans, including hidden ones: x1, y1, x2, y2."""

    label: str
    box: tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Picture:
    jpeg: bytes
    width: int
    height: int
    shapes: tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class _Stencil:
    """The coverage (0..1) of a shape, for the part of the picture that it spans."""

    coverage: Array
    left: int
    top: int

    @property
    def window(self) -> tuple[slice, slice]:
        height, width = self.coverage.shape
        return slice(self.top, self.top + height), slice(self.left, self.left + width)

    @property
    def box(self) -> tuple[int, int, int, int]:
        height, width = self.coverage.shape
        return self.left, self.top, self.left + width, self.top + height


def draw_picture(random: np.random.Generator) -> Picture:
    """Return a picture with 1 to MOST_SHAPES shapes; the generator decides everything."""
    long_side = int(random.integers(LONG_SIDE[0], LONG_SIDE[1] + 1))
    short_side = round(long_side * random.uniform(ASPECT, 1.0))
    width, height = (long_side, short_side) if random.random() < 0.6 else (short_side, long_side)
    canvas = _background(random, width, height)
    shapes = _draw_shapes(random, canvas)
    return Picture(_photograph(random, canvas), width, height, shapes)


def draw_pictures(seed: int, count: int) -> list[Picture]:
    random = np.random.default_rng(seed)
    return [draw_picture(random) for _ in range(count)]


def _background(random: np.random.Generator, width: int, height: int) -> Array:
    """Return FP32, height x width x 3, levels of 0..255."""
    first, second, third = (random.uniform(10, 245, 3).astype(np.float32) for _ in range(3))
    clouds = _clouds(random, width, height)[..., np.newaxis]
    canvas = first + (second - first) * clouds
    canvas += (third - canvas) * (_ramp(random, width, height)[..., np.newaxis] * np.float32(random.uniform(0, 0.7)))
    for _ in range(random.integers(0, 5)):
        _add_blob(random, canvas)
    if random.random() < 0.35:
        _add_stripes(random, canvas)
    if random.random() < 0.5:
        canvas = _add_hairs(random, canvas)
    grain = _small_noise(random, width, height, int(random.integers(24, 96)))
    canvas += (grain[..., np.newaxis] - 0.5) * np.float32(random.uniform(0, 40))
    return np.clip(canvas, 0, 255)


def _clouds(random: np.random.Generator, width: int, height: int) -> Array:
    """Return noise of several scales, each half as strong as the next coarser one; 0..1."""
    clouds = np.zeros((height, width), dtype=np.float32)
    for octave, cells in enumerate((3, 6, 12, 24)):
        clouds += _small_noise(random, width, height, cells) * np.float32(0.5**octave)
    clouds -= clouds.min()
    return clouds / max(float(clouds.max()), 1e-6)


def _small_noise(random: np.random.Generator, width: int, height: int, cells: int) -> Array:
    """Return `cells` x `cells` random levels of 0..1, enlarged smoothly."""
    coarse = Image.fromarray(random.random((cells, cells), dtype=np.float32))
    return np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))


def _ramp(random: np.random.Generator, width: int, height: int) -> Array:
    """Return a ramp from 0 to 1 across the picture, or outwards from a point."""
    rows, columns = np.ogrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    if random.random() < 0.5:
        angle = random.uniform(0, 2 * np.pi)
        ramp = rows * np.sin(angle) + columns * np.cos(angle)
    else:
        ramp = np.hypot(rows - random.random(), columns - random.random())
    ramp -= ramp.min()
    scaled: Array = (ramp / ramp.max()).astype(np.float32)
    return scaled


def _add_blob(random: np.random.Generator, canvas: Array) -> None:
    """Add a soft patch, without an edge that could be taken for a circle's."""
    height, width = canvas.shape[:2]
    rows, columns = np.ogrid[0:height, 0:width]
    spread = random.uniform(0.06, 0.25, 2) * min(width, height)
    distance = ((columns - random.uniform(0, width)) / spread[0]) ** 2
    distance = distance + ((rows - random.uniform(0, height)) / spread[1]) ** 2
    strength = (np.exp(-distance / 2) * random.uniform(0.3, 0.9)).astype(np.float32)[..., np.newaxis]
    canvas += (random.uniform(0, 255, 3).astype(np.float32) - canvas) * strength


def _add_stripes(random: np.random.Generator, canvas: Array) -> None:
    height, width = canvas.shape[:2]
    rows, columns = np.ogrid[0:height, 0:width]
    angle, period = random.uniform(0, np.pi), random.uniform(5, 40)
    wave = np.sin((rows * np.sin(angle) + columns * np.cos(angle)) * (2 * np.pi / period))
    canvas += (wave * random.uniform(3, 22)).astype(np.float32)[..., np.newaxis]


def _add_hairs(random: np.random.Generator, canvas: Array) -> Array:
    """Add thin lines, straight and bent, as edges that belong to no shape."""
    height, width = canvas.shape[:2]
    image = Image.fromarray(np.clip(canvas, 0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    for _ in range(random.integers(1, 7)):
        points = random.uniform((-0.1, -0.1), (1.1, 1.1), (int(random.integers(2, 5)), 2)) * (width, height)
        colour = tuple(int(level) for level in random.integers(0, 256, 3))
        draw.line([tuple(point) for point in points], fill=colour, width=int(random.integers(1, 4)), joint="curve")
    return np.asarray(image).astype(np.float32)


def _draw_shapes(random: np.random.Generator, canvas: Array) -> tuple[Shape, ...]:
    """Paint shapes onto the canvas, each over the earlier ones."""
    height, width = canvas.shape[:2]
    owner = np.full((height, width), -1, dtype=np.int8)
    areas: list[int] = []
    shapes: list[Shape] = []
    for _ in range(random.integers(1, MOST_SHAPES + 1)):
        label = LABELS[random.integers(len(LABELS))]
        for _ in range(PLACEMENT_ATTEMPTS):
            stencil = _stencil(random, label, width, height)
            if stencil is not None and _leaves_others_visible(stencil, owner, areas):
                _paint(random, canvas, stencil)
                inside = stencil.coverage >= 0.5
                owner[stencil.window][inside] = len(shapes)
                areas.append(int(inside.sum()))
                shapes.append(Shape(label, stencil.box))
                break
    return tuple(shapes)


def _stencil(random: np.random.Generator, label: str, width: int, height: int) -> _Stencil | None:
    """Return a shape of random size, place and rotation; None if too much of it lies outside the picture."""
    # On a logarithmic scale, small shapes are as frequent as large ones.
    radius = min(width, height) / 2 * np.exp(random.uniform(*np.log(DIAMETER)))
    centre = random.uniform(0, (width, height))
    corners = _corners(random, label) * radius + centre
    low = np.floor(corners.min(axis=0)).astype(int) - 1
    high = np.ceil(corners.max(axis=0)).astype(int) + 1
    size = (high - low) * OVERSAMPLING
    mask = Image.new("L", (int(size[0]), int(size[1])), 0)
    ImageDraw.Draw(mask).polygon([tuple(corner) for corner in (corners - low) * OVERSAMPLING], fill=255)
    coverage = np.asarray(mask.reduce(OVERSAMPLING), dtype=np.float32) / 255
    whole = float(coverage.sum())
    left, top = int(low[0]), int(low[1])
    coverage = coverage[max(0, -top) : height - top, max(0, -left) : width - left]
    if coverage.size == 0 or float(coverage.sum()) < LEAST_INSIDE * whole:
        return None
    rows, columns = np.nonzero((coverage >= 0.5).any(axis=1))[0], np.nonzero((coverage >= 0.5).any(axis=0))[0]
    coverage = coverage[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    return _Stencil(coverage, max(left, 0) + int(columns[0]), max(top, 0) + int(rows[0]))


def _corners(random: np.random.Generator, label: str) -> Array:
    """Return a shape's outline within the unit circle, turned at random; [corners, 2]."""
    count = {"circle": 64, "square": 4, "triangle": 3}[label]
    angles = random.uniform(0, 2 * np.pi) + np.arange(count) * (2 * np.pi / count)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def _leaves_others_visible(stencil: _Stencil, owner: Array, areas: Sequence[int]) -> bool:
    """Return whether the existing shapes keep enough uncovered pixels, including what they have lost to earlier ones.
    `owner` has the visible shape of each pixel."""
    covered = owner[stencil.window][stencil.coverage >= 0.5]
    for index, area in enumerate(areas):
        lost = int(np.count_nonzero(covered == index))
        if lost and np.count_nonzero(owner == index) - lost < LEAST_VISIBLE * area:
            return False
    return True


def _paint(random: np.random.Generator, canvas: Array, stencil: _Stencil) -> None:
    """Fill the shape with one colour that stands out, lighter towards one side."""
    behind = canvas[stencil.window]
    inside = stencil.coverage >= 0.5
    mean = behind[inside].mean(axis=0)
    colour = random.uniform(0, 255, 3)
    while np.linalg.norm(colour - mean) < LEAST_CONTRAST:
        colour = random.uniform(0, 255, 3)
    height, width = stencil.coverage.shape
    shade = (_ramp(random, width, height) - 0.5) * random.uniform(0, 60)
    fill = colour.astype(np.float32) + shade[..., np.newaxis]
    behind += (fill - behind) * stencil.coverage[..., np.newaxis]


def _photograph(random: np.random.Generator, canvas: Array) -> bytes:
    """Return a JPEG: slightly out of focus, noisy, more or less compressed."""
    image = Image.fromarray(np.clip(canvas, 0, 255).astype(np.uint8))
    image = image.filter(ImageFilter.GaussianBlur(random.uniform(0, 1.6)))
    noise = random.standard_normal(canvas.shape, dtype=np.float32) * np.float32(random.uniform(0, 12))
    noisy = np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8)
    encoded = io.BytesIO()
    Image.fromarray(noisy).save(encoded, "JPEG", quality=int(random.integers(60, 96)))
    return encoded.getvalue()


def write_pictures(pictures: Sequence[Picture], folder: Path) -> None:
    """Write 00.jpg, 01.jpg, ... and truth.json, which has the label and the box of every shape in each picture."""
    folder.mkdir(parents=True, exist_ok=True)
    truth = {}
    for index, picture in enumerate(pictures):
        name = f"{index:02}.jpg"
        (folder / name).write_bytes(picture.jpeg)
        truth[name] = [{"label": shape.label, "box": shape.box} for shape in picture.shapes]
    lines = (f'  "{name}": {json.dumps(shapes)}' for name, shapes in truth.items())
    (folder / "truth.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def read_truth(folder: Path) -> dict[str, tuple[Shape, ...]]:
    """Return what `write_pictures` wrote, by the picture's file name."""
    truth = json.loads((folder / "truth.json").read_text())
    return {
        name: tuple(Shape(shape["label"], tuple(shape["box"])) for shape in shapes) for name, shapes in truth.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw pictures of circles, squares and triangles.")
    parser.add_argument("--count", type=int, default=12, help="how many (default 12)")
    parser.add_argument("--seed", type=int, default=1, help="the same seed gives the same pictures (default 1)")
    parser.add_argument("--out", type=Path, default=Path("build/shapes"), help="the folder (default build/shapes)")
    options = parser.parse_args()
    write_pictures(draw_pictures(options.seed, options.count), options.out)
    print(f"{options.out}: {options.count} pictures and truth.json")


if __name__ == "__main__":
    main()
