"""Calibration data that are images: they go through the model's own rocAL pipeline, on the CPU engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rocserve.backends.base import Batch, LoadedModel, ModelSource
from rocserve.core.datatypes import DataType, datatype_of
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.model_config import InstanceKind, ModelConfig, OutputConfig
from rocserve.core.tensors import Tensor, encode_bytes_elements

_SUFFIXES = frozenset({".jpg", ".jpeg", ".png"})
_OUTPUT = "image"


def is_image(file: Path) -> bool:
    return file.suffix.lower() in _SUFFIXES


def prepare_images(
    files: Sequence[Path], pipeline: Path, input_name: str, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> Sequence[np.ndarray[Any, Any]]:
    """What the pipeline makes of each image: an array of `shape` (an image's, without a batch dimension) each.

    `input_name`: which the images are for.

    Raises:
        ServeError: INVALID_ARGUMENT; the pipeline is wrong or gives another shape, or an image cannot be decoded.
    """
    # Here and not above: OpenCV takes its time to import, and only images need it.
    from rocserve.backends.rocal.backend import load
    from rocserve.backends.rocal.interface import OutputContradiction

    try:
        model = load(_as_model(pipeline, shape, dtype))
    except OutputContradiction as error:
        raise invalid_argument(
            f"the model's input '{input_name}' takes images of shape {list(shape)} and type {dtype},"
            f" but calibration_pipeline {pipeline.name} does not make such: {error.given}"
        ) from None
    try:
        (image, *arguments) = model.signature.inputs
        if image.datatype is not DataType.BYTES or arguments:
            raise invalid_argument(
                f"calibration_pipeline {pipeline.name} must take nothing but encoded images; it takes"
                f" {', '.join(spec.name for spec in model.signature.inputs)}"
            )
        return [_run(model, image.name, len(image.shape), file) for file in files]
    finally:
        model.close()


def _as_model(pipeline: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> ModelSource:
    config = ModelConfig(
        name=pipeline.name,
        backend="rocal",
        max_batch_size=1,
        outputs=(OutputConfig(_OUTPUT, datatype_of(np.empty(0, dtype)), shape),),
        parameters={"engine": "cpu"},
    )
    return ModelSource(
        name=pipeline.name,
        version=1,
        model_folder=pipeline.parent,
        version_folder=pipeline.parent,
        model_file=pipeline,
        config=config,
        instance_kind=InstanceKind.CPU,
        device=None,
        instance_count=1,
    )


def _run(model: LoadedModel, name: str, rank: int, file: Path) -> np.ndarray[Any, Any]:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise invalid_argument(f"calibration image {file.name} cannot be read: {error.strerror}") from None
    tensor = Tensor(name, DataType.BYTES, (1,) * rank, encode_bytes_elements([data]))
    result = model.execute(Batch({name: tensor}, (_OUTPUT,), (1,)))
    failure: ServeError | None = result.failures.get(0)
    if failure is not None:
        raise invalid_argument(f"calibration image {file.name} does not do: {failure.text}")
    output = result.outputs[_OUTPUT]
    rows = output.numpy() if isinstance(output, Tensor) else output
    return np.array(rows[0])
