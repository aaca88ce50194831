"""Writes a sheet of small images, each with its predicted label; wrong labels are outlined in red."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

COLUMNS = 18
IMAGE_SIZE = 72
CAPTION_HEIGHT = 20
GAP = 16
TITLE_HEIGHT = 48
OUTLINE = 4

PAPER, INK, WRONG = "#ffffff", "#202020", "#d00000"


@dataclass(frozen=True, slots=True)
class Tile:
    image: Path
    caption: str
    right: bool


def write_contact_sheet(tiles: Sequence[Tile], title: str, path: Path) -> None:
    """Write the tiles, row by row, as a PNG at `path`, and make its folder."""
    width = COLUMNS * (IMAGE_SIZE + GAP) + GAP
    rows = math.ceil(len(tiles) / COLUMNS)
    row_height = IMAGE_SIZE + CAPTION_HEIGHT + GAP
    sheet = Image.new("RGB", (width, TITLE_HEIGHT + rows * row_height + GAP), PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((GAP, TITLE_HEIGHT / 2), title, fill=INK, font=ImageFont.load_default(22), anchor="lm")
    font = ImageFont.load_default(14)
    for index, tile in enumerate(tiles):
        left = GAP + index % COLUMNS * (IMAGE_SIZE + GAP)
        top = TITLE_HEIGHT + index // COLUMNS * row_height
        with Image.open(tile.image) as image:
            small = image.convert("RGB").resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.LANCZOS)
        sheet.paste(small, (left, top))
        if not tile.right:
            box = (left - OUTLINE, top - OUTLINE, left + IMAGE_SIZE + OUTLINE - 1, top + IMAGE_SIZE + OUTLINE - 1)
            draw.rectangle(box, outline=WRONG, width=OUTLINE)
        middle = (left + IMAGE_SIZE / 2, top + IMAGE_SIZE + OUTLINE + CAPTION_HEIGHT / 2)
        draw.text(middle, tile.caption, fill=INK if tile.right else WRONG, font=font, anchor="mm")
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)
