"""Hue and saturation, against the standard library's colour models."""

from __future__ import annotations

import colorsys
from typing import Any

import numpy as np
import pytest
from support.rocal_operations import Array, assert_rounded, make, picture, result


def reference(
    pixels: Array, degrees: float = 0, saturation: float = 1, brightness: float = 1, contrast: float = 0
) -> Array:
    """Levels, neither rounded nor clamped."""
    changed = np.empty(pixels.shape)
    for row, column in np.ndindex(pixels.shape[:2]):
        hue, colourfulness, value = colorsys.rgb_to_hsv(*(int(level) / 255 for level in pixels[row, column]))
        turned = colorsys.hsv_to_rgb((hue + degrees / 360) % 1, min(colourfulness * saturation, 1), value)
        changed[row, column] = [part * brightness * 255 + contrast for part in turned]
    return changed


def colours() -> Array:
    """All that are made of five levels, greys, black and white among them; and some others."""
    levels = np.array([0, 51, 102, 204, 255], dtype=np.uint8)
    regular = np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), axis=-1).reshape(5, 25, 3)
    return np.concatenate((regular, picture(8, 25)))


@pytest.mark.parametrize("degrees", [0, 30, 90.5, 180, 359, 360, 400, -45])
def test_hue_is_turned_by_degrees(degrees: float) -> None:
    given = result(make("hue", hue=degrees), colours())
    assert_rounded(given, reference(colours(), degrees=degrees))


def test_hue_of_nothing_changes_nothing() -> None:
    np.testing.assert_array_equal(result(make("hue", hue=0), colours()), colours())
    np.testing.assert_array_equal(result(make("hue", hue=360), colours()), colours())


def test_red_becomes_green_and_then_blue() -> None:
    red = np.full((1, 1, 3), (255, 0, 0), dtype=np.uint8)
    assert result(make("hue", hue=120), red).ravel().tolist() == [0, 255, 0]
    assert result(make("hue", hue=240), red).ravel().tolist() == [0, 0, 255]


@pytest.mark.parametrize("factor", [0, 0.3, 1, 1.7, 100])
def test_saturation_is_multiplied(factor: float) -> None:
    given = result(make("saturation", saturation=factor), colours())
    assert_rounded(given, reference(colours(), saturation=factor))


def test_no_saturation_is_the_largest_level_in_grey() -> None:
    given = result(make("saturation", saturation=0), colours())
    np.testing.assert_array_equal(given, np.repeat(colours().max(axis=2, keepdims=True), 3, axis=2))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"contrast": 0}, {}),
        ({}, {"contrast": 1}),
        ({"brightness": 1.3, "contrast": -20}, {"brightness": 1.3, "contrast": -20}),
        ({"contrast": 0, "hue": 70.9}, {"degrees": 70}),
        ({"contrast": 0, "hue": -100}, {"degrees": -100}),
        ({"contrast": 0, "hue": 725}, {"degrees": 5}),
        ({"contrast": 0, "saturation": 0.4}, {"saturation": 0.4}),
        ({"contrast": 5, "saturation": 2, "brightness": 0.7}, {"contrast": 5, "saturation": 2, "brightness": 0.7}),
        ({"contrast": 5, "saturation": 2, "hue": 200}, {"contrast": 5, "saturation": 2, "degrees": 200}),
    ],
)
def test_colour_twist_adds_its_contrast(keys: dict[str, Any], expected: dict[str, Any]) -> None:
    given = result(make("color_twist", **keys), colours())
    assert_rounded(given, reference(colours(), **expected))
