"""What comes along with a network's weights: its configuration and labels, and the pipeline and ensemble around it."""

from __future__ import annotations

import shutil
from pathlib import Path

import rocserve

SAMPLES = {
    "efficientnet_lite0": ("efficientnet_lite0",),
    "resnet50": ("resnet50", "resnet50_preprocess", "resnet50_probabilities", "classify_image"),
    "yolov4": ("yolov4", "yolov4_preprocess", "yolov4_postprocess", "detect_objects"),
}
"""By the network's name, the model folders."""
_PACKAGE = Path(rocserve.__file__).parent
_PLACES = (_PACKAGE / "samples", _PACKAGE.parents[1] / "model_repository")
"""Of a wheel, and of a checkout."""


def copy_samples(name: str, repository: Path) -> tuple[str, ...]:
    """Put the model folders of a network into a repository, where they are not there; returns which.

    Raises:
        OSError: a folder cannot be written.
    """
    source = next(place for place in _PLACES if place.is_dir())
    missing = tuple(folder for folder in SAMPLES[name] if not (repository / folder / "config.pbtxt").is_file())
    for folder in missing:
        # What a checkout's own `rocserve get` has left stays there.
        ignored = ("1", "*part") if folder == name else ("__pycache__",)
        shutil.copytree(
            source / folder, repository / folder, ignore=shutil.ignore_patterns(*ignored), dirs_exist_ok=True
        )
    return missing
