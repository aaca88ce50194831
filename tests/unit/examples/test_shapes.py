"""The pictures of shapes: the same for a seed, with true boxes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

SHAPES = Path(__file__).parents[2] / "data" / "shapes"


@pytest.fixture(scope="module")
def shapes():
    import shapes

    return shapes


@pytest.fixture(scope="module")
def pictures(shapes):
    return shapes.draw_pictures(seed=5, count=25)


def test_a_seed_s_pictures_are_the_same(shapes, pictures):
    assert shapes.draw_pictures(seed=5, count=2) == pictures[:2]
    assert shapes.draw_pictures(seed=6, count=1)[0].jpeg != pictures[0].jpeg


def test_sizes_and_boxes_are_those_of_the_jpeg(shapes, pictures):
    for picture in pictures:
        with Image.open(io.BytesIO(picture.jpeg)) as image:
            assert (image.format, image.size) == ("JPEG", (picture.width, picture.height))
        assert 1 <= len(picture.shapes) <= shapes.MOST_SHAPES
        for shape in picture.shapes:
            left, top, right, bottom = shape.box
            assert 0 <= left < right <= picture.width
            assert 0 <= top < bottom <= picture.height
            assert shape.label in shapes.LABELS
    assert len({(picture.width, picture.height) for picture in pictures}) == len(pictures)
    assert {shape.label for picture in pictures for shape in picture.shapes} == set(shapes.LABELS)


def test_a_shape_stands_out_in_its_box_alone(shapes):
    """On a plain ground the painted pixels reach each side of the box, and none lies outside."""
    random = np.random.default_rng(1)
    for label in shapes.LABELS:
        for _ in range(20):
            stencil = shapes._stencil(random, label, 200, 150)
            if stencil is None:
                continue
            canvas = np.full((150, 200, 3), 128, dtype=np.float32)
            shapes._paint(random, canvas, stencil)
            rows, columns = np.nonzero(np.abs(canvas - 128).max(axis=-1) > 1)
            box = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
            np.testing.assert_allclose(stencil.box, box, atol=1)


def test_written_pictures_are_read_back(shapes, pictures, tmp_path):
    shapes.write_pictures(pictures[:3], tmp_path)
    assert shapes.read_truth(tmp_path) == {f"{index:02}.jpg": pictures[index].shapes for index in range(3)}
    assert (tmp_path / "01.jpg").read_bytes() == pictures[1].jpeg


def test_the_pictures_in_the_tree_have_their_truth():
    truth = json.loads((SHAPES / "truth.json").read_text())
    assert sorted(truth) == sorted(path.name for path in SHAPES.glob("*.jpg"))


def test_the_pictures_in_the_tree_can_be_drawn_again(shapes):
    """By the command in docs/guides/detection.md. The bytes may differ, because JPEG encoders do."""
    assert shapes.read_truth(SHAPES) == {
        f"{index:02}.jpg": picture.shapes for index, picture in enumerate(shapes.draw_pictures(161803, 10))
    }
