"""What `rocserve detect` prints, draws and writes; e2e/test_image_commands.py runs the command."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from support.full_disk import full_disk


@pytest.fixture
def detect():
    from rocserve_tools.images import detect

    return detect


def cup(detect, *box: float):
    return detect.Detection("cup", 3, 0.9, box)


def printed(table, width: int = 100) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_a_box_that_is_nowhere_is_a_fault_of_its_picture_alone(detect, tmp_path):
    nowhere = [(float("nan"), 0, 9, 9), (0, 0, float("inf"), 9), (-1e30, 1e30, 2e30, 2e30)]
    findings = []
    for name, box in zip(("nan.jpg", "endless.jpg", "far.jpg"), nowhere, strict=True):
        Image.new("RGB", (320, 240)).save(tmp_path / name)
        findings.append(detect.Finding(tmp_path / name, (cup(detect, *box),)))
    fault, *written = detect.write_drawings(findings, tmp_path)
    assert fault.error.startswith(f"cannot draw it into {tmp_path}/nan.png: ")
    assert written == [tmp_path / "endless.png", tmp_path / "far.png"]


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
    assert fault.error == f"cannot draw it into {tmp_path / 'one.png'}: Is a directory"
    assert written == tmp_path / "two.png"


@pytest.mark.parametrize("before", [b"", b"an earlier drawing"])
def test_a_full_disk_leaves_no_part_of_a_drawing(detect, tmp_path, before):
    Image.new("RGB", (200, 200)).save(tmp_path / "one.jpg")
    (tmp_path / "out").mkdir()
    if before:
        (tmp_path / "out" / "one.png").write_bytes(before)
    with full_disk():
        (fault,) = detect.write_drawings([detect.Finding(tmp_path / "one.jpg")], tmp_path / "out")
    assert fault.error == f"cannot draw it into {tmp_path / 'out' / 'one.png'}: File too large"
    assert [path.read_bytes() for path in (tmp_path / "out").iterdir()] == ([before] if before else [])


def test_a_fault_names_an_image_that_can_no_longer_be_opened(detect, tmp_path):
    (fault,) = detect.write_drawings([detect.Finding(tmp_path / "gone.jpg")], tmp_path)
    assert "No such file or directory" in fault.error


@pytest.mark.parametrize(("size", "drawn"), [((60, 300), (180, 900)), ((1, 1), (160, 160)), ((1, 5000), (1, 5000))])
def test_small_pictures_are_enlarged_so_that_names_can_be_read(detect, tmp_path, size, drawn):
    Image.new("RGB", size, "#404040").save(tmp_path / "small.jpg")
    found = cup(detect, 0.0, 0.0, size[0], size[1])
    (path,) = detect.write_drawings([detect.Finding(tmp_path / "small.jpg", (found,))], tmp_path)
    with Image.open(path) as picture:
        assert picture.size == drawn
        from rocserve_tools.images.drawing import class_colour

        pixels = np.asarray(picture)
        assert tuple(pixels[-1, -1]) == class_colour(3), "the box still ends where the picture does"


def test_sixteen_bits_a_level_are_not_cut_off(tmp_path):
    from rocserve_tools.images.drawing import read_picture

    levels = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    Image.fromarray(levels).save(tmp_path / "deep.png")
    picture = np.asarray(read_picture(tmp_path / "deep.png"))
    np.testing.assert_array_equal(picture[..., 0], np.arange(256).reshape(16, 16))


def test_a_large_picture_is_drawn_without_a_warning(tmp_path, monkeypatch, recwarn):
    from rocserve_tools.images.drawing import read_picture

    Image.new("RGB", (40, 30)).save(tmp_path / "large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    assert read_picture(tmp_path / "large.png").size == (40, 30)
    assert not recwarn.list


def test_a_file_without_an_end_is_no_image(tmp_path, monkeypatch):
    from rocserve.core.errors import ServeError
    from rocserve_tools.images import asking

    monkeypatch.setattr(asking, "_LARGEST_IMAGE", 3 << 20)
    with pytest.raises(ServeError, match="it has more than the 3145728 bytes that an image may have"):
        asking.read_image(Path("/dev/zero"))
    (tmp_path / "large").write_bytes(bytes(3 << 20))
    assert asking.read_image(tmp_path / "large") == bytes(3 << 20)


def test_the_table_says_how_many_more_there_are_and_where_there_are_none(detect):
    many = detect.Finding(Path("many.jpg"), tuple(cup(detect, 0, 0, 5, number) for number in range(5)))
    findings = [many, detect.Finding(Path("none.jpg")), detect.Finding(Path("bad.jpg"), error="not an image")]
    text = printed(detect.findings_table(findings, 2))
    assert text.count("cup") == 2
    assert "and 3 more" in text
    assert "nothing" in text
    assert "bad.jpg" not in text, "faults are printed beside the table"


@pytest.mark.parametrize("name", ["photos/01.jpg", "a/long/way/to/the/photographs/of/the/year/before/the/last/01.jpg"])
def test_nothing_is_cut_on_a_narrow_terminal(detect, name):
    from rocserve_client import Classification
    from rocserve_tools.images.asking import Finding
    from rocserve_tools.images.classify import findings_table

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


@pytest.fixture
def drawing():
    from rocserve_tools.images import drawing

    return drawing


def grey(width=320, height=240):
    return Image.new("RGB", (width, height), (90, 90, 90))


def test_the_line_runs_around_the_box_in_the_class_s_colour(drawing):
    found = drawing.Detection("cup", 3, 0.876, (60.0, 80.0, 200.0, 180.0))
    drawn = drawing.draw_detections(grey(), [found])
    colour = drawing.class_colour(3)
    for place in ((58, 130), (201, 130), (130, 181), (190, 78)):
        assert drawn.getpixel(place) == colour
    for place in ((60, 130), (199, 130), (130, 179), (190, 80), (130, 130), (30, 30), (250, 200)):
        assert drawn.getpixel(place) == (90, 90, 90)


def test_the_line_of_a_box_at_the_edge_is_in_the_picture(drawing):
    found = drawing.Detection("cup", 3, 0.876, (0.0, 0.0, 320.0, 240.0))
    drawn = drawing.draw_detections(grey(), [found])
    for place in ((0, 130), (319, 130), (130, 239), (300, 0)):
        assert drawn.getpixel(place) == drawing.class_colour(3)


def test_the_plate_is_above_the_box_or_inside_where_there_is_no_room(drawing):
    colour = drawing.class_colour(0)
    above = np.asarray(drawing.draw_detections(grey(), [drawing.Detection("cup", 0, 0.5, (60, 80, 200, 180))]))
    assert (above[70:79, 57:59] == colour).all()
    inside = np.asarray(drawing.draw_detections(grey(), [drawing.Detection("cup", 0, 0.5, (60, 1, 200, 180))]))
    assert (inside[4:12, 57:59] == colour).all()
    # At the right edge the name moves left, so that all of it shows.
    at_edge = np.asarray(drawing.draw_detections(grey(), [drawing.Detection("umbrella", 0, 0.5, (310, 80, 320, 90))]))
    assert (at_edge[70:79] == colour).all(axis=-1).any(axis=0).sum() > 40


def test_the_picture_itself_stays_as_it_is(drawing):
    picture = grey()
    before = picture.tobytes()
    drawing.draw_detections(picture, [drawing.Detection("cup", 0, 0.5, (5, 5, 50, 50))])
    assert picture.tobytes() == before


def test_boxes_at_and_of_the_edge_are_no_error(drawing):
    boxes = [(0.0, 0.0, 320.0, 240.0), (319.2, 239.1, 320.0, 240.0), (10.0, 10.0, 10.2, 10.3)]
    drawing.draw_detections(grey(), [drawing.Detection("cup", 1, 0.5, box) for box in boxes])
    drawing.draw_detections(grey(8, 8), [drawing.Detection("a long name", 1, 1.0, (0, 0, 8, 8))])


def test_colours_of_coco_s_classes_differ(drawing):
    colours = np.array([drawing.class_colour(index) for index in range(80)], dtype=int)
    distances = np.abs(colours[:, np.newaxis] - colours).sum(axis=-1)
    np.fill_diagonal(distances, 999)
    assert distances.min() > 5
    assert np.abs(np.diff(colours, axis=0)).sum(axis=-1).min() > 100


def test_a_sheet_shows_all_pictures(tmp_path):
    import picture_sheet

    tiles = [picture_sheet.Tile(grey(), "one\ntwo"), *(picture_sheet.Tile(grey(50, 400), "three") for _ in range(4))]
    picture_sheet.write_picture_sheet(tiles, "a title", tmp_path / "new" / "sheet.png")
    with Image.open(tmp_path / "new" / "sheet.png") as sheet:
        pixels = np.asarray(sheet)
    cell, gap = picture_sheet.CELL_SIZE, picture_sheet.GAP
    assert pixels.shape[1] == 4 * (cell + gap) + gap
    row = picture_sheet.TITLE_HEIGHT + cell // 2
    for column in range(4):
        assert (pixels[row, gap + column * (cell + gap) + cell // 2] == 90).all()
    second_row = row + cell + 2 * picture_sheet.LINE_HEIGHT + 2 * gap
    assert (pixels[second_row, gap + cell // 2] == 90).all()
    assert (pixels[second_row, gap + cell + gap + cell // 2] == 255).all()


def test_a_long_caption_stays_beneath_its_picture(tmp_path):
    import picture_sheet

    tiles = [picture_sheet.Tile(grey(), "gas pump, " * 20), picture_sheet.Tile(grey(), "")]
    picture_sheet.write_picture_sheet(tiles, "a title", tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as sheet:
        pixels = np.asarray(sheet)
    cell, gap = picture_sheet.CELL_SIZE, picture_sheet.GAP
    captions = pixels[picture_sheet.TITLE_HEIGHT + cell :]
    assert (captions[:, : gap + cell] != 255).any()
    assert (captions[:, gap + cell + 1 :] == 255).all()
