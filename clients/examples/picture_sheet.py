"""Writes a sheet of pictures of any size, each with a caption of one or more lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont, ImageOps

COLUMNS = 4
CELL_SIZE = 380
LINE_HEIGHT = 20
GAP = 16
TITLE_HEIGHT = 56

PAPER, GROUND, INK = "#ffffff", "#f0f0f0", "#202020"


@dataclass(frozen=True, slots=True)
class Tile:
    picture: Image.Image
    caption: str


def write_picture_sheet(tiles: Sequence[Tile], title: str, path: Path) -> None:
    """Write the tiles, row by row, as a PNG at `path`, and make its folder. Pictures are scaled to fit their cells."""
    columns = min(COLUMNS, len(tiles))
    caption_height = LINE_HEIGHT * max(len(tile.caption.splitlines()) for tile in tiles)
    title_font, font = ImageFont.load_default(24), ImageFont.load_default(15)
    width = max(columns * (CELL_SIZE + GAP) + GAP, round(title_font.getlength(title)) + 2 * GAP)
    row_height = CELL_SIZE + caption_height + 2 * GAP
    rows = math.ceil(len(tiles) / columns)
    sheet = Image.new("RGB", (width, TITLE_HEIGHT + rows * row_height), PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((GAP, TITLE_HEIGHT / 2), title, fill=INK, font=title_font, anchor="lm")
    for index, tile in enumerate(tiles):
        left = GAP + index % columns * (CELL_SIZE + GAP)
        top = TITLE_HEIGHT + index // columns * row_height
        cell = ImageOps.pad(tile.picture, (CELL_SIZE, CELL_SIZE), Image.Resampling.LANCZOS, color=GROUND)
        sheet.paste(cell, (left, top))
        caption = "\n".join(_cut(line, font) for line in tile.caption.splitlines())
        draw.multiline_text((left, top + CELL_SIZE + GAP / 2), caption, fill=INK, font=font, spacing=5)
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)


def _cut(line: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    """Cut the text to the width of a picture."""
    if font.getlength(line) <= CELL_SIZE:
        return line
    while font.getlength(f"{line}...") > CELL_SIZE:
        line = line[:-1]
    return f"{line}..."
