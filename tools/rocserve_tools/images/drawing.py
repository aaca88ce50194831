"""Draws detections into a picture: a box in the class's colour, and a plate with label and score."""

from __future__ import annotations

import colorsys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from rocserve_tools.images.detect import Detection

_LEGIBLE_SIDE = 160
"""Pixels that a label and its score need. A picture with a shorter side is enlarged."""
_LONGEST_SIDE = 4096
"""No side is enlarged beyond this number of pixels."""


def class_colour(class_index: int) -> tuple[int, int, int]:
    # Two classes are a golden section of the colour circle apart: neighbouring ones get distant hues.
    red, green, blue = colorsys.hsv_to_rgb(class_index * 0.618034 % 1.0, 0.85, 1.0)
    return round(red * 255), round(green * 255), round(blue * 255)


def read_picture(path: Path) -> Image.Image:
    """Read a file as RGB with 8 bits per channel. The EXIF orientation is ignored, because the model ignores it too.
    Raises OSError if the file cannot be read, Image.DecompressionBombError if it has more pixels than Pillow opens."""
    with warnings.catch_warnings():
        # The server has checked the size against its limits and decoded the image.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        picture = Image.open(path)
    with picture:
        if picture.mode.startswith("I;16"):  # Pillow would clip 16-bit channels at 255.
            return Image.fromarray((np.asarray(picture) // 257).astype(np.uint8)).convert("RGB")
        return picture.convert("RGB")


def enlarge(picture: Image.Image, detections: Sequence[Detection]) -> tuple[Image.Image, list[Detection]]:
    """Enlarge a small picture by a whole factor, and its detections with it. A larger picture is returned unchanged."""
    factor = max(1, min(-(-_LEGIBLE_SIDE // min(picture.size)), _LONGEST_SIDE // max(picture.size)))
    if factor == 1:
        return picture, list(detections)
    large = picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
    moved = []
    for found in detections:
        left, top, right, bottom = (side * factor for side in found.box)
        moved.append(replace(found, box=(left, top, right, bottom)))
    return large, moved


def draw_detections(picture: Image.Image, detections: Sequence[Detection]) -> Image.Image:
    """Return a copy of the picture with the detections drawn. High scores, which come first, are drawn on top."""
    drawn = picture.copy()
    draw = ImageDraw.Draw(drawn)
    side = min(picture.size)
    line = max(2, round(side / 180))
    font = ImageFont.load_default(max(11, round(side / 28)))
    # Pillow refuses coordinates far outside the picture, and a model may return any.
    within = [replace(found, box=tuple(np.clip(found.box, 0, picture.size * 2).tolist())) for found in detections]
    for found in reversed(within):
        # The coloured line lies between two dark ones, so that it is visible on any background. It runs outside of the
        # object if there is room, because it would cover a small object.
        left, top, right, bottom = (round(side) for side in found.box)
        left, top = max(left - line - 1, 0), max(top - line - 1, 0)
        right = max(min(right + line, picture.width - 1), left)
        bottom = max(min(bottom + line, picture.height - 1), top)
        draw.rectangle((left - 1, top - 1, right + 1, bottom + 1), outline="#101010", width=line + 2)
        draw.rectangle((left, top, right, bottom), outline=class_colour(found.class_index), width=line)
    # All plates are drawn after all boxes, so that no line crosses a label.
    for found in reversed(within):
        _draw_plate(draw, found, font, picture.size, line)
    return drawn


def _draw_plate(
    draw: ImageDraw.ImageDraw,
    found: Detection,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
    picture_size: tuple[int, int],
    line: int,
) -> None:
    """Draw the plate above the box, or inside if there is no room, but always within the picture."""
    text = f"{found.label} {found.score:.0%}"
    text_left, text_top, text_right, text_bottom = draw.textbbox((0, 0), text, font=font)
    width, height = text_right - text_left + 3 * line, text_bottom - text_top + 3 * line
    left = min(max(round(found.box[0]) - line - 1, 0), max(picture_size[0] - round(width), 0))
    top = round(found.box[1]) - height
    if top < 0:
        top = min(max(round(found.box[1]), 0), max(picture_size[1] - round(height), 0))
    colour = class_colour(found.class_index)
    draw.rectangle((left, top, left + width, top + height), fill=colour)
    place = (left + 1.5 * line - text_left, top + 1.5 * line - text_top)
    red, green, blue = colour
    is_bright = 0.299 * red + 0.587 * green + 0.114 * blue > 120
    draw.text(place, text, font=font, fill="#000000" if is_bright else "#ffffff")
