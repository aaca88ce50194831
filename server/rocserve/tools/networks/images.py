"""Synthetic images with the statistics of photographs, for measuring what activations a network has."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_SHAPES_AN_IMAGE = 6
_COLOUR_SHARE = 0.35
"""How much of the contrast is colour; in photographs brightness varies more."""


def photo_like_images(count: int, side: int, seed: int) -> NDArray[np.float32]:
    """FP32 [count, side, side, 3], RGB, 0..1: clouds whose amplitude falls with frequency, behind plain shapes,
    some of them dark, some bright, some of little contrast.

    In photographs the amplitude falls about as 1 / frequency (D. J. Field, 1987), and objects have sharp edges.
    """
    generator = np.random.default_rng(seed)
    return np.stack([_image(generator, side) for _ in range(count)])


def _image(generator: np.random.Generator, side: int) -> NDArray[np.float32]:
    light = _cloud(generator, side)[..., None]
    colour = np.stack([_cloud(generator, side) for _ in range(3)], axis=-1)
    image = (1.0 - _COLOUR_SHARE) * light + _COLOUR_SHARE * colour
    rows, columns = np.mgrid[0:side, 0:side] / side
    for _ in range(_SHAPES_AN_IMAGE):
        y, x = generator.random(2)
        height, width = generator.uniform(0.05, 0.3, 2)
        if generator.random() < 0.5:
            inside = (np.abs(rows - y) < height) & (np.abs(columns - x) < width)
        else:
            inside = ((rows - y) / height) ** 2 + ((columns - x) / width) ** 2 < 1.0
        image[inside] = 0.3 * image[inside] + 0.7 * generator.random(3)
    darkest, brightest = generator.uniform(0.0, 0.4), generator.uniform(0.6, 1.0)
    return (darkest + (brightest - darkest) * image).astype(np.float32)


def _cloud(generator: np.random.Generator, side: int) -> NDArray[np.float64]:
    """[side, side], 0..1."""
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None, :])
    frequency[0, 0] = np.inf
    spectrum = np.fft.rfft2(generator.standard_normal((side, side))) / frequency
    field = np.fft.irfft2(spectrum, s=(side, side))
    least, most = field.min(), field.max()
    level: NDArray[np.float64] = (field - least) / (most - least)
    return level
