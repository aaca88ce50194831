"""The measure of detectors, compared with cases worked out by hand and with scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture
def measure():
    import average_precision

    return average_precision


def boxes_of(measure, *entries):
    """(picture, label, x of a 10 x 10 box, score)."""
    return [measure.LabelledBox(picture, label, (x, 0, x + 10, 10), score) for picture, label, x, score in entries]


def test_intersection_over_union(measure):
    assert measure.intersection_over_union((0, 0, 10, 10), (0, 0, 10, 10)) == 1
    assert measure.intersection_over_union((0, 0, 10, 10), (5, 0, 15, 10)) == pytest.approx(1 / 3)
    assert measure.intersection_over_union((0, 0, 10, 10), (10, 0, 20, 10)) == 0
    assert measure.intersection_over_union((0, 0, 4, 4), (1, 1, 3, 3)) == 0.25


def test_everything_right_is_one_and_nothing_is_zero(measure):
    true = boxes_of(measure, ("a", "cat", 0, 1), ("a", "dog", 50, 1), ("b", "cat", 20, 1))
    assert measure.mean_average_precision(true, true) == 1
    assert measure.mean_average_precision([], true) == 0


def test_a_wrong_box_costs_as_much_as_comes_after_it(measure):
    true = boxes_of(measure, ("a", "cat", 0, 1), ("a", "cat", 50, 1))
    right_first = boxes_of(measure, ("a", "cat", 0, 0.9), ("a", "cat", 200, 0.8), ("a", "cat", 50, 0.7))
    # Precision 1 up to a recall of a half, then 2 of 3 are right.
    assert measure.mean_average_precision(right_first, true) == pytest.approx(0.5 + 0.5 * 2 / 3)
    wrong_first = boxes_of(measure, ("a", "cat", 200, 0.9), ("a", "cat", 0, 0.8), ("a", "cat", 50, 0.7))
    assert measure.mean_average_precision(wrong_first, true) == pytest.approx(2 / 3)


def test_a_shape_found_twice_counts_once(measure):
    true = boxes_of(measure, ("a", "cat", 0, 1), ("a", "cat", 50, 1))
    twice = boxes_of(measure, ("a", "cat", 0, 0.9), ("a", "cat", 1, 0.8), ("a", "cat", 50, 0.7))
    assert measure.mean_average_precision(twice, true) == pytest.approx(0.5 + 0.5 * 2 / 3)


def test_a_box_in_another_picture_of_another_label_or_too_far_off_is_wrong(measure):
    true = boxes_of(measure, ("a", "cat", 0, 1))
    assert measure.mean_average_precision(boxes_of(measure, ("b", "cat", 0, 1)), true) == 0
    assert measure.mean_average_precision(boxes_of(measure, ("a", "dog", 0, 1)), true) == 0
    near, far = boxes_of(measure, ("a", "cat", 3, 1)), boxes_of(measure, ("a", "cat", 4, 1))
    assert measure.mean_average_precision(near, true) == 1
    assert measure.mean_average_precision(far, true) == 0


def test_the_mean_is_over_the_labels_of_the_truth(measure):
    true = boxes_of(measure, ("a", "cat", 0, 1), ("a", "dog", 50, 1))
    found = boxes_of(measure, ("a", "cat", 0, 0.9), ("a", "bird", 50, 0.9))
    assert measure.mean_average_precision(found, true) == 0.5
    with pytest.raises(ValueError, match="at least one true box"):
        measure.mean_average_precision(found, [])


def test_it_is_scikit_learn_s_area_but_for_the_levelled_precision(measure):
    """If precision only falls with recall, levelling changes nothing and both sums are equal."""
    # Importing it takes seconds in each process that collects the tests.
    from sklearn.metrics import average_precision_score

    random = np.random.default_rng(3)
    for _ in range(20):
        right = np.arange(40) < random.integers(1, 39)
        true = boxes_of(measure, *(("a", "cat", 20 * index, 1) for index in range(int(right.sum()))))
        scores = np.linspace(1, 0.1, 40)
        found = boxes_of(measure, *(("a", "cat", 20 * index, score) for index, score in enumerate(scores)))
        expected = average_precision_score(right, scores)
        assert measure.mean_average_precision(found, true) == pytest.approx(expected)
