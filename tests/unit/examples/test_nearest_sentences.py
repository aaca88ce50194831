"""Which sentences are nearest; e2e/test_real_text_encoder.py asks a real encoder."""

from __future__ import annotations

import numpy as np
import pytest


def test_the_direction_of_vectors_decides_and_not_their_length() -> None:
    from nearest_sentences import nearest

    vectors = np.array([[0, 10], [3, 4], [0.5, 0], [-1, 0]], np.float32)
    found = nearest(np.array([2, 0], np.float32), vectors, ["up", "between", "right", "left"], 3)
    assert [neighbour.sentence for neighbour in found] == ["right", "between", "up"]
    assert [neighbour.nearness for neighbour in found] == pytest.approx([1, 0.6, 0])
