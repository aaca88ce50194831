"""What is wrong with an image that was sent."""

from __future__ import annotations


class ImageError(ValueError):
    """An image that cannot be decoded; the text names its fault."""
