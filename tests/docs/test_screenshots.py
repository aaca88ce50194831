"""`make screenshots`: pictures of the page that show what their page says, from a real server and a real Chromium."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from support.browser import NEEDS_CHROMIUM
from support.migraphx import CHECKOUT

SHOWN = {
    "models": ((1280, 640), "light", ["Needs attention", "detect_shapes_network", "READY", "UNAVAILABLE"]),
    "failed": ((1280, 820), "light", ["product_names", "UNAVAILABLE", "Traceback", "labels.json", "config.pbtxt"]),
    "detection": ((1280, 920), "dark", ["Try it", "circle", "square", "detect_shapes_network", "all in the server"]),
    "graph": ((390, 660), "light", ["Steps", "image_size INT32", "detect_shapes_postprocess", "%"]),
    "vector": ((390, 560), "dark", ["PROBABILITIES", "10 numbers from 0 to", "LABEL", "Answered in"]),
}
"""Name -> size, theme, texts that are in view."""


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("screenshots")
    command = [sys.executable, str(CHECKOUT / "docs/screenshots.py"), str(folder), "--seconds=0.2", "--texts"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert [Path(line.partition(":")[0]) for line in ran.stdout.splitlines()] == [
        folder / f"{name}.png" for name in SHOWN
    ]
    return folder


@NEEDS_CHROMIUM
@pytest.mark.parametrize("name", SHOWN)
def test_the_command_takes_each_picture(pictures: Path, name: str) -> None:
    size, theme, texts = SHOWN[name]
    with Image.open(pictures / f"{name}.png") as picture:
        assert picture.size == size
        colours = picture.convert("RGB").getcolors(size[0] * size[1])
    assert colours is not None
    # A blank page has one colour; a page with text and charts has many, and its background is the most frequent.
    count, background = max(colours)
    assert isinstance(background, tuple)
    assert len(colours) > 50
    assert count < 0.95 * size[0] * size[1]
    assert (sum(background) > 3 * 128) == (theme == "light")
    shown = (pictures / f"{name}.txt").read_text()
    assert [text for text in texts if text not in shown] == []


def test_the_page_shows_these_pictures() -> None:
    folder = CHECKOUT / "docs/screenshots"
    assert {file.stem for file in folder.iterdir()} == {*SHOWN}
    page = (CHECKOUT / "docs/guides/page.md").read_text()
    assert [name for name in SHOWN if f"(../screenshots/{name}.png)" not in page] == []
    for name, (size, *_) in SHOWN.items():
        with Image.open(folder / f"{name}.png") as picture:
            assert picture.size == size
