"""Heads -> boxes, compared with formulas written out cell by cell and OpenCV's suppression."""

from __future__ import annotations

import numpy as np
import pytest
from support.slow_yolo import opencv_suppress, slow_decode

from rocserve.presets import yolo

ANCHORS = (((12, 16), (19, 36), (40, 28)), ((36, 75), (76, 55), (72, 146)), ((142, 110), (192, 243), (459, 401)))
STRIDES, XY_SCALES = (8, 16, 32), (1.2, 1.1, 1.05)


@pytest.fixture
def geometries():
    return [yolo.HeadGeometry(*one) for one in zip(STRIDES, ANCHORS, XY_SCALES, strict=True)]


def random_heads(seed, input_size=416, classes=80):
    """Heads as a network gives them: raw boxes, and probabilities of which few are high."""
    random = np.random.default_rng(seed)
    heads = []
    for stride in STRIDES:
        side = input_size // stride
        raw = random.normal(0, 1, (side, side, 3, 4))
        probabilities = random.random((side, side, 3, 1 + classes)) ** 4
        heads.append(np.concatenate([raw, probabilities], axis=-1).astype(np.float32))
    return heads


def made_of(found):
    scores, classes, boxes = ([entry[place] for entry in found] for place in range(3))
    return yolo.Detections(
        np.array(boxes, dtype=np.float32).reshape(-1, 4),
        np.array(scores, dtype=np.float32),
        np.array(classes, dtype=np.int32),
    )


def assert_same(detections, found, tolerance=1e-3):
    assert len(detections.scores) == len(found)
    np.testing.assert_allclose(detections.scores, [score for score, _, _ in found], rtol=1e-5)
    np.testing.assert_array_equal(detections.classes, [number for _, number, _ in found])
    boxes = np.array([box for _, _, box in found]).reshape(-1, 4)
    np.testing.assert_allclose(detections.boxes, boxes, rtol=1e-4, atol=tolerance)


def random_boxes(seed, count, classes=3, whole=False):
    random = np.random.default_rng(seed)
    corners = random.uniform(0, 80, (count, 2))
    boxes = np.concatenate([corners, corners + random.uniform(1, 40, (count, 2))], axis=1)
    if whole:
        boxes = np.stack([np.floor(boxes[:, 0]), np.floor(boxes[:, 1]), np.ceil(boxes[:, 2]), np.ceil(boxes[:, 3])], 1)
    scores = random.integers(1, 20, count) / 20 if whole else random.uniform(0.05, 1, count)
    rows = zip(scores, random.integers(0, classes, count), boxes.astype(np.float32), strict=True)
    return [(float(np.float32(score)), int(number), tuple(map(float, box))) for score, number, box in rows]


def test_the_whole_way_follows_the_formulas_and_opencv(geometries):
    heads = random_heads(5)
    thresholds = yolo.Thresholds(score=0.5, iou=0.213, max_boxes=10_000)
    found = [entry for head, one in zip(heads, geometries, strict=True) for entry in slow_decode(head, one, 0.5)]
    scale_x, scale_y = 640 / 416, 300 / 416
    limits = (640, 300)
    placed = []
    for score, number, (x1, y1, x2, y2) in found:
        corners = (x1 * scale_x, y1 * scale_y, x2 * scale_x, y2 * scale_y)
        box = tuple(min(max(side, 0.0), limits[index % 2]) for index, side in enumerate(corners))
        placed.append((score, number, box))
    expected = opencv_suppress(placed, 0.213)
    assert 100 < len(expected) < len(found)
    assert_same(yolo.detect(heads, geometries, yolo.Resize.STRETCH, (300, 640), thresholds), expected, tolerance=0.02)


@pytest.mark.parametrize("iou", [0.0, 0.213, 0.5, 0.9])
@pytest.mark.parametrize("seed", range(5))
def test_suppression_is_opencv_s(seed, iou):
    found = random_boxes(seed, 120)
    assert_same(yolo.suppress(made_of(found), iou, 1000), opencv_suppress(found, iou))


@pytest.mark.parametrize("seed", range(5))
def test_of_equal_scores_the_first_is_the_best(seed):
    found = random_boxes(seed, 120, whole=True)
    assert len({score for score, _, _ in found}) < 20
    assert_same(yolo.suppress(made_of(found), 0.3, 1000), opencv_suppress(found, 0.3))


def test_an_overlap_of_just_the_threshold_stays():
    found = [(0.9, 0, (0.0, 0.0, 10.0, 10.0)), (0.8, 0, (0.0, 0.0, 10.0, 5.0))]
    assert_same(yolo.suppress(made_of(found), 0.5, 10), found)
    assert_same(yolo.suppress(made_of(found), 0.499, 10), found[:1])


def test_the_same_box_thrice_is_one_unless_the_classes_differ():
    box = (3.0, 4.0, 50.0, 60.0)
    assert_same(yolo.suppress(made_of([(0.5, 1, box), (0.7, 1, box), (0.6, 1, box)]), 0.5, 10), [(0.7, 1, box)])
    three = [(0.7, 2, box), (0.6, 0, box), (0.5, 1, box)]
    assert_same(yolo.suppress(made_of(three), 0.5, 10), three)


def test_the_best_boxes_are_given_where_there_are_too_many():
    found = random_boxes(3, 200)
    everything = opencv_suppress(found, 0.4)
    assert len(everything) > 20
    assert_same(yolo.suppress(made_of(found), 0.4, 20), everything[:20])


def test_every_one_of_10647_boxes(geometries):
    """Heads of an untrained network: everything is somewhat probable."""
    heads = random_heads(11)
    for head in heads:
        head[..., 4:] = 0.55 + head[..., 4:] * 0.4
    thresholds = yolo.Thresholds(score=0.25, iou=0.213, max_boxes=100)
    detections = yolo.detect(heads, geometries, yolo.Resize.STRETCH, (416, 416), thresholds)
    assert detections.boxes.shape == (100, 4)
    candidates = [yolo.decode(head, one, 0.25) for head, one in zip(heads, geometries, strict=True)]
    assert sum(len(part.scores) for part in candidates) == 10_647
    found = []
    for part in candidates:
        clipped = part.boxes.clip(0, 416)
        rows = zip(part.scores, part.classes, clipped, strict=True)
        found += [(float(score), int(number), tuple(map(float, box))) for score, number, box in rows]
    assert_same(detections, opencv_suppress(found, 0.213)[:100])


@pytest.mark.parametrize("probability", [0.0, 0.39])
def test_nothing_is_found_below_the_threshold(geometries, probability):
    heads = random_heads(2)
    for head in heads:
        head[..., 4:] = probability
    thresholds = yolo.Thresholds(score=0.16, iou=0.5, max_boxes=100)
    detections = yolo.detect(heads, geometries, yolo.Resize.STRETCH, (50, 60), thresholds)
    assert detections.boxes.shape == (0, 4)
    assert detections.scores.shape == detections.classes.shape == (0,)
    assert (detections.boxes.dtype, detections.classes.dtype) == (np.float32, np.int32)


def test_wild_values_do_no_harm(geometries):
    heads = random_heads(2)
    for head in heads:
        head[..., 4:] *= 0.5
    heads[0][5, 6, 1] = [0, 0, 800, 900, 0.99, *([0.99] * 80)]
    heads[1][3, 3, 0] = [np.nan, 0, 0, 0, 0.99, *([0.99] * 80)]
    heads[2][1, 1, 2] = [0, 0, 0, 0, np.nan, *([np.nan] * 80)]
    heads[2][2, 2, 2] = [-900, 900, -900, -900, 0.98, *([0.98] * 80)]
    thresholds = yolo.Thresholds(score=0.9, iou=0.5, max_boxes=100)
    with np.errstate(over="raise"):
        detections = yolo.detect(heads, geometries, yolo.Resize.STRETCH, (50, 60), thresholds)
    assert np.isfinite(detections.boxes).all()
    assert np.isfinite(detections.scores).all()
    # The giant box covers the image; boxes of no size, or smaller than any number, are dropped.
    np.testing.assert_array_equal(detections.boxes[0], [0, 0, 60, 50])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("objectness", "probability"), [(np.inf, 1), (np.inf, 0), (1, np.inf), (1, np.nan), (np.nan, 1), (-np.inf, -np.inf)]
)
def test_a_score_that_is_no_number_is_none(geometries, objectness, probability):
    heads = [np.zeros((side, side, 3, 7), dtype=np.float32) for side in (16, 8, 4)]
    heads[0][5, 5, 0, 4:] = objectness, 0, probability
    heads[1][3, 2, 1, 4:] = 0.9, 0.8, 0.1
    thresholds = yolo.Thresholds(score=0.25, iou=0.5, max_boxes=100)
    detections = yolo.detect(heads, geometries, yolo.Resize.STRETCH, (50, 60), thresholds)
    np.testing.assert_allclose(detections.scores, [0.72])
    assert np.isfinite(detections.boxes).all()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("seed", range(6))
def test_heads_full_of_extremes_follow_the_formulas(geometries, seed):
    """Raw values up to the largest floats and beyond: boxes lie in the image, best first, as the formulas say."""
    random = np.random.default_rng(seed)
    heads = random_heads(seed, input_size=128, classes=3)
    for head in heads:
        wild = random.random(head[..., :4].shape) < 0.1
        head[..., :4][wild] = random.choice([np.inf, -np.inf, 3e38, -3e38, 89, -104], wild.sum())
    height, width = 300, 40
    resize = list(yolo.Resize)[seed % 3]
    thresholds = yolo.Thresholds(score=0.2, iou=1.0, max_boxes=10_000)
    detections = yolo.detect(heads, geometries, resize, (height, width), thresholds)
    scale = np.array([128 / width, 128 / height] if resize is yolo.Resize.STRETCH else [128 / height] * 2)
    margin = (128 - np.array([width, height]) * scale) / 2 * (resize is yolo.Resize.LETTERBOX)
    expected = []
    for head, geometry in zip(heads, geometries, strict=True):
        for score, number, box in slow_decode(
            np.nan_to_num(head, posinf=40, neginf=-200).clip(-200, 40), geometry, 0.2
        ):
            corners = ((np.array(box).reshape(2, 2) - margin) / scale).clip(0, [width, height])
            if (corners[1] - corners[0] > 1e-4).all():
                expected.append((score, number, tuple(corners.ravel())))
    assert len(expected) > 50
    wide = (detections.boxes[:, 2:] - detections.boxes[:, :2] > 1e-4).all(axis=1)
    assert_same(detections[wide], sorted(expected, key=lambda one: -one[0]), tolerance=0.01)


@pytest.mark.parametrize("resize", ["stretch", "not_larger", "letterbox"])
@pytest.mark.parametrize("size", [(300, 640), (640, 300), (416, 416), (33, 1000)])
def test_boxes_come_back_through_the_resize(resize, size):
    """A box in the original, drawn into the network's input as the pipeline resizes it, is found at its place."""
    height, width = size
    original = np.array([[0.1 * width, 0.2 * height, 0.6 * width, 0.9 * height]])
    factors = np.array([416 / width, 416 / height])
    margin = np.zeros(2)
    if resize != "stretch":
        factors[:] = 416 / max(size)
    if resize == "letterbox":
        margin = np.array([(416 - width * factors[0]) / 2, (416 - height * factors[1]) / 2])
    seen = original * np.tile(factors, 2) + np.tile(margin, 2)
    found = made_of([(0.5, 0, tuple(seen[0]))])
    placed = yolo.place(found, yolo.Resize(resize), (416, 416), size)
    np.testing.assert_allclose(placed.boxes, original, rtol=1e-4)


def test_boxes_are_cut_at_the_image_and_left_out_beyond_it():
    found = made_of([(0.9, 0, (-10, -20, 30, 430)), (0.8, 1, (420, 10, 450, 20)), (0.7, 2, (10, 300, 20, 310))])
    placed = yolo.place(found, yolo.Resize.NOT_LARGER, (416, 416), (104, 208))
    # At a scale of 2 the image takes the upper half: the third box lies in the empty lower half.
    np.testing.assert_allclose(placed.boxes, [[0, 0, 15, 104]])
    np.testing.assert_array_equal(placed.classes, [0])


def test_an_error_names_the_shapes_of_heads_that_do_not_belong_together(geometries):
    thresholds = yolo.Thresholds(score=0.5, iou=0.5, max_boxes=10)
    heads = random_heads(1)
    with pytest.raises(ValueError, match=r"inputs of different sizes .*\(416, 416\), \(832, 832\)"):
        yolo.detect([heads[0], heads[0], heads[2]], geometries, yolo.Resize.STRETCH, (5, 5), thresholds)
    with pytest.raises(ValueError, match=r"head 1 must have shape \[rows, columns, 3, 5 \+ classes\], got \[26, 26, 2"):
        yolo.detect([heads[0], heads[1][:, :, :2], heads[2]], geometries, yolo.Resize.STRETCH, (5, 5), thresholds)
    with pytest.raises(ValueError, match=r"height and width of the original image, got \[0, 7\]"):
        yolo.detect(heads, geometries, yolo.Resize.STRETCH, (0, 7), thresholds)


def test_boxes_of_one_head_are_brought_to_the_image():
    """YOLOv8: an image of 200 x 100 fills the top half of an input of 64 x 64."""
    head = np.array(
        [[32, 32, 8], [16, 16, 8], [16, 18, 4], [8, 8, 4], [0.1, 0.2, 0.9], [0.8, 0.7, np.nan]], dtype=np.float32
    )
    thresholds = yolo.Thresholds(score=0.25, iou=0.5, max_boxes=10)
    place = ((64, 64), yolo.Resize.NOT_LARGER, (100, 200), thresholds)
    for form, array in ((yolo.HeadForm.CLASSES, head), (yolo.HeadForm.CLASS_ROWS, head.T)):
        assert_same(yolo.detect_boxes(array, form, *place), [(0.8, 1, (75, 37.5, 125, 62.5))], tolerance=1e-3)


def test_the_probability_of_an_object_counts_in_rows_that_have_one():
    """YOLOv5: 0.5 * 0.9 = 0.45 is a box of class 1; 0.3 * 0.8 = 0.24 is below the threshold."""
    rows = np.array([[32, 16, 16, 8, 0.5, 0.2, 0.9], [8, 8, 4, 4, 0.3, 0.8, 0.1]], dtype=np.float32)
    thresholds = yolo.Thresholds(score=0.25, iou=0.5, max_boxes=10)
    form, resize = yolo.HeadForm.OBJECT_ROWS, yolo.Resize.NOT_LARGER
    found = yolo.detect_boxes(rows, form, (64, 64), resize, (100, 200), thresholds)
    assert_same(found, [(0.45, 1, (75, 37.5, 125, 62.5))], tolerance=1e-3)


def test_finished_boxes_are_only_brought_to_the_image():
    """Corners, score and class. Boxes that overlap stay, empty rows go."""
    rows = np.array(
        [[24, 12, 40, 20, 0.8, 2], [24, 12, 40, 21, 0.7, 2], [24, 12, 40, 20, 0.9, np.nan], [0] * 6], dtype=np.float32
    )
    thresholds = yolo.Thresholds(score=0.25, iou=1, max_boxes=10)
    found = yolo.detect_boxes(rows, yolo.HeadForm.FINISHED, (64, 64), yolo.Resize.NOT_LARGER, (100, 200), thresholds)
    expected = [(0.8, 2, (75, 37.5, 125, 62.5)), (0.7, 2, (75, 37.5, 125, 65.625))]
    assert_same(found, expected, tolerance=1e-3)


def test_boxes_whose_sixth_column_is_a_probability_are_not_finished() -> None:
    rows = np.array([[10, 10, 20, 20, 0.1, 0.2], [0.5, 0.5, 0.1, 0.1, 0.9, 0.4]], np.float32)
    with pytest.raises(ValueError, match=r"a box has the class 0\.4, expected a whole number"):
        yolo.detect_boxes(
            rows, yolo.HeadForm.FINISHED, (64, 64), yolo.Resize.NOT_LARGER, (64, 64), yolo.Thresholds(0.25, 0.5, 9)
        )
