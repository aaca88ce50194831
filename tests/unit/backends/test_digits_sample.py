"""The sample repository's classifier on the held-out JPEGs, through both engines as workers load them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from rocserve.backends.base import Batch, LoadedModel, ModelSource
from rocserve.backends.onnx import backend as onnx_backend
from rocserve.backends.rocal import backend as rocal_backend
from rocserve.core.datatypes import DataType
from rocserve.core.model_config import InputConfig, InstanceKind, ModelConfig, OutputConfig
from rocserve.core.tensors import Tensor, encode_bytes_elements, tensor_from_numpy

ROOT = Path(__file__).resolve().parents[3]
REPOSITORY = ROOT / "model_repository"
IMAGES = sorted((ROOT / "tests" / "data" / "digits").glob("*.jpg"))
LABELS = (REPOSITORY / "digits_classifier" / "labels.txt").read_text().split()

REQUIRED_ACCURACY = 0.97
MAX_BATCH_SIZE = 32


def source(name: str, filename: str, config: ModelConfig) -> ModelSource:
    folder = REPOSITORY / name
    return ModelSource(name, 1, folder, folder / "1", folder / "1" / filename, config, InstanceKind.AUTO, None, 1)


@pytest.fixture(scope="module")
def preprocess() -> LoadedModel:
    config = ModelConfig(
        "digits_preprocess",
        max_batch_size=MAX_BATCH_SIZE,
        inputs=(InputConfig("ENCODED", DataType.BYTES, (1,)),),
        outputs=(OutputConfig("IMAGE", DataType.FP32, (1, 16, 16)),),
        parameters={"color_format": "U8"},
    )
    return rocal_backend.load(source("digits_preprocess", "pipeline.json", config))


@pytest.fixture(scope="module")
def classifier() -> LoadedModel:
    config = ModelConfig("digits_classifier", max_batch_size=MAX_BATCH_SIZE)
    return onnx_backend.load(source("digits_classifier", "model.onnx", config))


def classify(preprocess: LoadedModel, classifier: LoadedModel, images: Sequence[bytes]) -> tuple[np.ndarray, list[str]]:
    """Probabilities [images, 10] and labels."""
    encoded = Tensor("ENCODED", DataType.BYTES, (len(images), 1), encode_bytes_elements(images))
    prepared = preprocess.execute(Batch({"ENCODED": encoded}, ("IMAGE",), (len(images),)))
    assert not prepared.failures
    tensor = tensor_from_numpy("IMAGE", np.asarray(prepared.outputs["IMAGE"]))
    answer = classifier.execute(Batch({"IMAGE": tensor}, ("PROBABILITIES", "LABEL"), (len(images),))).outputs
    assert answer["LABEL"].shape == (len(images), 1)
    return np.asarray(answer["PROBABILITIES"]), [str(label) for label in np.asarray(answer["LABEL"])[:, 0]]


def test_signatures_fit_together(preprocess: LoadedModel, classifier: LoadedModel) -> None:
    (prepared,), (taken,) = preprocess.signature.outputs, classifier.signature.inputs
    assert prepared == taken
    assert classifier.signature.supports_batching
    assert preprocess.signature.supports_batching


def test_held_out_accuracy(preprocess: LoadedModel, classifier: LoadedModel) -> None:
    assert len(IMAGES) >= 200
    assert len(LABELS) == 10
    expected = [image.stem.rpartition("_")[2] for image in IMAGES]
    assert set(expected) == set(LABELS)
    right = 0
    for start in range(0, len(IMAGES), MAX_BATCH_SIZE):
        files = [image.read_bytes() for image in IMAGES[start : start + MAX_BATCH_SIZE]]
        probabilities, labels = classify(preprocess, classifier, files)
        np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-5)
        assert labels == [LABELS[best] for best in probabilities.argmax(axis=1)]
        right += sum(map(str.__eq__, labels, expected[start : start + MAX_BATCH_SIZE]))
    assert right >= REQUIRED_ACCURACY * len(IMAGES)


def test_an_answer_does_not_depend_on_its_company(preprocess: LoadedModel, classifier: LoadedModel) -> None:
    files = [image.read_bytes() for image in IMAGES[:8]]
    together, _ = classify(preprocess, classifier, files)
    alone = np.concatenate([classify(preprocess, classifier, [file])[0] for file in files])
    np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-6)


def test_the_model_is_small() -> None:
    assert (REPOSITORY / "digits_classifier" / "1" / "model.onnx").stat().st_size < 1_000_000
