"""Checks the drawn pictures: docs/pictures has what `make pictures` writes, and pages show them for both themes."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.migraphx import CHECKOUT

DRAWN = runpy.run_path(str(CHECKOUT / "docs/pictures.py"))
FILES: dict[str, str] = dict(DRAWN["files"]())
FOLDER: Path = DRAWN["FOLDER"]
PAGES = [CHECKOUT / "README.md", *sorted(CHECKOUT.glob("docs/**/*.md"))]
PICTURE = re.compile(r'<picture>\s*<source media="[^"]*dark[^"]*" srcset="([^"]+)">\s*<img alt="[^"]+" src="([^"]+)">')
SVG = "{http://www.w3.org/2000/svg}"
LETTER = 0.62
"""The width of a letter, in parts of its size, that no font of the list exceeds on average."""


def test_the_folder_has_what_the_command_writes() -> None:
    assert {file.name: file.read_text() for file in FOLDER.glob("*.svg")} == FILES


@pytest.mark.parametrize("name", FILES)
def test_no_text_is_cut(name: str) -> None:
    root = ElementTree.fromstring(FILES[name])
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for text in root.iter(f"{SVG}text"):
        long = LETTER * float(text.attrib["font-size"]) * len(text.text or "")
        share = {"start": 0.0, "middle": 0.5, "end": 1.0}[text.attrib["text-anchor"]]
        left = float(text.attrib["x"]) - share * long
        assert left >= 0 and left + long <= width and float(text.attrib["y"]) <= height, text.text


def test_pages_show_each_picture_for_both_themes() -> None:
    shown = set()
    for page in PAGES:
        text = page.read_text()
        found = PICTURE.findall(text)
        assert len(found) == text.count("<picture>"), f"{page}: a picture without one of its themes"
        for dark, light in found:
            assert light == dark.replace("-dark.svg", "-light.svg")
            shown |= {(page.parent / file).resolve() for file in (dark, light)}
    assert shown == {FOLDER / name for name in FILES}
