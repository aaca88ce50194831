"""What `rocserve detect` prints and writes; e2e/test_example_commands.py runs it as a command."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console


@pytest.fixture
def detect():
    from rocserve.tools.images import detect

    return detect


def cup(detect, *box: float):
    return detect.Detection("cup", 3, 0.9, box)


def printed(table, width: int = 100) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_files_of_one_name_get_drawings_of_their_own(detect, tmp_path):
    findings = []
    for number in range(3):
        path = tmp_path / str(number) / "photo.jpg"
        path.parent.mkdir()
        Image.new("RGB", (300 + number, 200)).save(path)
        findings.append(detect.Finding(path))
    findings.insert(1, detect.Finding(tmp_path / "missing.jpg", error="there is no such file"))
    (tmp_path / "out").mkdir()
    written = list(detect.write_drawings(findings, tmp_path / "out"))
    assert [path.name for path in written] == ["photo.png", "photo-2.png", "photo-3.png"]
    assert [Image.open(path).width for path in written] == [300, 301, 302]


def test_no_drawing_takes_the_place_of_an_image(detect, tmp_path):
    """--out may name the folder of the images, and these may be PNGs."""
    findings = []
    for name in ("photo.png", "photo-2.png"):
        Image.new("RGB", (200, 200), "#336699").save(tmp_path / name)
        findings.append(detect.Finding(tmp_path / name, (cup(detect, 10, 10, 90, 90),)))
    before = [finding.image.read_bytes() for finding in findings]
    written = list(detect.write_drawings(findings, tmp_path / "." / ""))
    assert [path.name for path in written] == ["photo-3.png", "photo-2-2.png"]
    assert [finding.image.read_bytes() for finding in findings] == before


def test_a_drawing_that_cannot_be_written_harms_no_other(detect, tmp_path):
    for name in ("one.jpg", "two.jpg"):
        Image.new("RGB", (200, 200)).save(tmp_path / name)
    (tmp_path / "one.png").mkdir()
    findings = [detect.Finding(tmp_path / name) for name in ("one.jpg", "two.jpg")]
    fault, written = detect.write_drawings(findings, tmp_path)
    assert fault.image == findings[0].image
    assert fault.error == f"it cannot be drawn into {tmp_path / 'one.png'}: Is a directory"
    assert written == tmp_path / "two.png"


def test_an_image_that_cannot_be_opened_any_more_is_told(detect, tmp_path):
    (fault,) = detect.write_drawings([detect.Finding(tmp_path / "gone.jpg")], tmp_path)
    assert "No such file or directory" in fault.error


@pytest.mark.parametrize(("size", "drawn"), [((60, 300), (180, 900)), ((1, 1), (160, 160)), ((1, 5000), (1, 5000))])
def test_small_pictures_are_enlarged_so_that_names_can_be_read(detect, tmp_path, size, drawn):
    Image.new("RGB", size, "#404040").save(tmp_path / "small.jpg")
    found = cup(detect, 0.0, 0.0, size[0], size[1])
    (path,) = detect.write_drawings([detect.Finding(tmp_path / "small.jpg", (found,))], tmp_path)
    with Image.open(path) as picture:
        assert picture.size == drawn
        from rocserve.tools.images.drawing import class_colour

        pixels = np.asarray(picture)
        assert tuple(pixels[-1, -1]) == class_colour(3), "the box still ends where the picture does"


def test_sixteen_bits_a_level_are_not_cut_off(tmp_path):
    from rocserve.tools.images.drawing import read_picture

    levels = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    Image.fromarray(levels).save(tmp_path / "deep.png")
    picture = np.asarray(read_picture(tmp_path / "deep.png"))
    np.testing.assert_array_equal(picture[..., 0], np.arange(256).reshape(16, 16))


def test_the_table_says_how_many_more_there_are_and_where_there_are_none(detect):
    many = detect.Finding(Path("many.jpg"), tuple(cup(detect, 0, 0, 5, number) for number in range(5)))
    findings = [many, detect.Finding(Path("none.jpg")), detect.Finding(Path("bad.jpg"), error="not an image")]
    text = printed(detect.findings_table(findings, 2))
    assert text.count("cup") == 2
    assert "and 3 more" in text
    assert "nothing" in text
    assert "bad.jpg" not in text, "faults are told beside the table"


@pytest.mark.parametrize("name", ["photos/01.jpg", "a/long/way/to/the/photographs/of/the/year/before/the/last/01.jpg"])
def test_nothing_is_cut_on_a_narrow_terminal(detect, name):
    from rocserve.tools.images.asking import Finding
    from rocserve.tools.images.classify import findings_table
    from rocserve_client import Classification

    best = Classification(0.981, 444, "bicycle-built-for-two, tandem bicycle, tandem")
    found = cup(detect, 1000, 2000, 3000, 4000)
    for table, expected in (
        (findings_table([Finding(Path(name), (best,))]), [best.label, "98.1%"]),
        (detect.findings_table([detect.Finding(Path(name), (found,))], 5), ["cup", "90.0%", "1000,2000,3000,4000"]),
    ):
        lines = [line.split("│") for line in printed(table, width=80).splitlines() if "│" in line]
        columns = ["".join(cell.strip() for cell in column) for column in zip(*lines, strict=True)]
        text = " ".join(columns).replace(" ", "")
        assert all(part.replace(" ", "") in text for part in (name, *expected)), text
