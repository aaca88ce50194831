"""The classify_image ensemble: JPEG, rocAL, ResNet-50, probabilities. Untrained weights cost as much as trained
ones."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import cv2
import numpy
from numpy.typing import NDArray

from benchmarks.bare_ensemble import BareEnsemble, image_batch
from benchmarks.networks import resnet50
from benchmarks.networks.layers import photo_like_images
from benchmarks.probe import Outputs
from benchmarks.sample_ensemble import REPOSITORY, VERSION, SampleEnsemble, read_ensemble

INPUT, OUTPUT = "ENCODED", "PROBABILITIES"
NETWORK = "resnet50"
ROWS, COLUMNS = 375, 500
"""The image's size, as of photographs in ImageNet."""
JPEG_QUALITY = 90
TOLERANCE = 1e-3
"""Relative; another batch size sums in another order."""


@dataclass(frozen=True, slots=True)
class ResNet50Ensemble(SampleEnsemble):
    """The ensemble; the right answer is what the engines alone give for the image."""

    expected: NDArray[Any]
    """Probabilities, [1000]."""

    group: ClassVar[str] = NETWORK
    input: ClassVar[str] = INPUT
    output: ClassVar[str] = OUTPUT
    concurrencies: ClassVar[tuple[int, ...]] = (8,)

    def accepts(self, answer: str) -> bool:
        """See SampleEnsemble."""
        return bool(numpy.isclose(float(answer), self.expected[0], rtol=TOLERANCE))

    def check(self, outputs: Outputs) -> None:
        """See SampleEnsemble."""
        numpy.testing.assert_allclose(outputs[OUTPUT].reshape(-1), self.expected, rtol=TOLERANCE, atol=1e-7)


def load_resnet50(folder: Path) -> ResNet50Ensemble:
    """Load the ensemble with an untrained network and a synthetic photo, which are made in `folder`."""
    network = folder / NETWORK
    shutil.copytree(REPOSITORY / NETWORK, network, ignore=shutil.ignore_patterns(str(VERSION)))
    version = network / str(VERSION)
    version.mkdir()
    (version / "model.onnx").write_bytes(resnet50.build().SerializeToString())
    image = folder / "photo.jpg"
    write_photo(image)
    ensemble, members = read_ensemble("classify_image", {NETWORK: network})
    unknown = ResNet50Ensemble(ensemble, members, image, numpy.empty(0))
    answer = BareEnsemble(unknown.steps()).run({INPUT: image_batch(image.read_bytes(), 1)}, [OUTPUT])
    return ResNet50Ensemble(ensemble, members, image, answer[OUTPUT].reshape(-1))


def write_photo(path: Path) -> None:
    levels = (photo_like_images(1, COLUMNS, 1)[0, :ROWS, ::-1] * 255).astype(numpy.uint8)
    if not cv2.imwrite(str(path), numpy.ascontiguousarray(levels[..., ::-1]), [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY]):
        raise OSError(f"cannot write {path}")
