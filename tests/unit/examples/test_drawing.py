"""Boxes in pictures, and sheets of pictures."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def drawing():
    from rocserve.tools.images import drawing

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
    # At the right edge it is moved to the left, so that it stays whole.
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
