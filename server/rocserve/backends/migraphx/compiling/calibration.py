"""Reads the samples that calibrate int8 and fp8, and makes the inputs of a program's runs from them.

    calibration_data        contents
    samples.npz             one array per input, under the input's name: [samples, ...]
    samples.npy             for one input: a sample, or [samples, ...]
    samples/                for one input: .npy files in the order of their names, each a sample or [samples, ...],
                            or images, which go through a rocAL pipeline
    samples/<input>/        for several inputs: a folder of .npy files per input

The samples are checked against the program's inputs because MIGraphX silently accepts wrong names, and aborts on wrong
shapes.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rocserve.backends.base import Batch, ModelSource
from rocserve.backends.contained_paths import path_within
from rocserve.backends.migraphx.binding import Array, ProgramTensor
from rocserve.backends.migraphx.compiling.recipe import ProgramRecipe, SourceKind
from rocserve.backends.migraphx.options import CompileOptions
from rocserve.backends.migraphx.tensors import IMAGE_RANK, client_tensor, program_view, varies
from rocserve.cache.digests import folder_digest
from rocserve.core.datatypes import DataType, datatype_of
from rocserve.core.errors import ServeError, invalid_argument, unreadable
from rocserve.core.model_config import InstanceKind, ModelConfig, OutputConfig
from rocserve.core.requests import TensorSpec
from rocserve.core.tensors import Tensor, encode_bytes_elements

_DEFAULT_PIPELINE = "pipeline.json"
_PIPELINE_OUTPUT = "image"
_ERROR_PREFIX = "calibration_data:"
"""The prefix of error texts about files in the folder."""
PIPELINE_HINT = (
    f"copy the one that prepares the model's images into its folder as {_DEFAULT_PIPELINE}, or name it in"
    " 'calibration_pipeline'"
)


def calibration_data(options: CompileOptions, model_folder: Path) -> Path:
    """Return the path of the calibration data, a file or a folder. Raises ServeError (INVALID_ARGUMENT) if it is
    missing, or outside of the model's folder."""
    path = path_within(model_folder, options.calibration_data, (model_folder,), "calibration_data")
    if not path.exists():
        raise invalid_argument(
            f"calibration_data '{options.calibration_data}' is not in the model's folder; copy it there, before the"
            " configuration"
        )
    return path


def calibration_pipeline(options: CompileOptions, model_folder: Path) -> Path | None:
    """Return the rocAL pipeline for calibration images; None = the model has none. Raises ServeError (INVALID_ARGUMENT)
    if the configured pipeline is missing, or outside of the model's folder."""
    name = options.calibration_pipeline or _DEFAULT_PIPELINE
    path = path_within(model_folder, name, (model_folder,), "calibration_pipeline")
    if path.is_file():
        return path
    if options.calibration_pipeline:
        raise invalid_argument(f"calibration_pipeline '{name}' is not a file in the model's folder; copy it there")
    return None


def calibration_digest(options: CompileOptions, model_folder: Path) -> str:
    """Return the SHA-256 of the data and the pipeline; "" = the precision needs no calibration. Raises ServeError like
    `calibration_data` and `calibration_pipeline`."""
    if not options.precision.needs_calibration:
        return ""
    data = calibration_data(options, model_folder)
    for name in (file.relative_to(data) for file in data.rglob("*")):
        # Links are checked before anything is read: a link may lead to an endless file.
        if not any(part.startswith(".") for part in name.parts):
            path_within(data, name.as_posix(), (model_folder,), _ERROR_PREFIX)
    digests = [folder_digest(data)]
    pipeline = calibration_pipeline(options, model_folder)
    if pipeline is not None:
        digests.append(folder_digest(pipeline))
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def prepare_images(
    files: Sequence[Path], pipeline: Path, input_name: str, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> Sequence[Array]:
    """Run the pipeline on each image, and return arrays of `shape`, without a batch dimension, for the input
    `input_name`. Raises ServeError (INVALID_ARGUMENT) if the pipeline is wrong or makes another shape, or if an image
    is damaged."""
    # Imported here because OpenCV is slow to import, and only images need it.
    from rocserve.backends.rocal.backend import load
    from rocserve.backends.rocal.interface import OutputContradiction

    output = OutputConfig(_PIPELINE_OUTPUT, datatype_of(np.empty(0, dtype)), shape)
    config = ModelConfig(
        name=pipeline.name, backend="rocal", max_batch_size=1, outputs=(output,), parameters={"engine": "cpu"}
    )
    folder = pipeline.parent
    try:
        model = load(ModelSource(pipeline.name, 1, folder, folder, pipeline, config, InstanceKind.CPU, None, 1))
    except OutputContradiction as error:
        raise invalid_argument(
            f"the model's input '{input_name}' takes images of shape {list(shape)} and type {dtype},"
            f" but calibration_pipeline {pipeline.name} makes others: {error.actual}"
        ) from None
    try:
        (image, *arguments) = model.signature.inputs
        if image.datatype is not DataType.BYTES or arguments:
            raise invalid_argument(
                f"calibration_pipeline {pipeline.name} must take only encoded images; it takes"
                f" {', '.join(spec.name for spec in model.signature.inputs)}"
            )
        prepared = []
        for file in files:
            try:
                data = file.read_bytes()
            except OSError as error:
                raise unreadable(f"calibration image {file.name} cannot be read: {error.strerror}", error) from None
            tensor = Tensor(image.name, DataType.BYTES, (1,) * len(image.shape), encode_bytes_elements([data]))
            result = model.execute(Batch({image.name: tensor}, (_PIPELINE_OUTPUT,), (1,)))
            failure: ServeError | None = result.failures.get(0)
            if failure is not None:
                raise invalid_argument(f"calibration image {file.name} cannot be used: {failure.text}")
            made = result.outputs[_PIPELINE_OUTPUT]
            prepared.append(np.array((made.numpy() if isinstance(made, Tensor) else made)[0]))
        return prepared
    finally:
        model.close()


def read_calibration(
    model_folder: Path, recipe: ProgramRecipe, parameters: Mapping[str, ProgramTensor]
) -> Sequence[Mapping[str, Array]]:
    """Return the inputs of each calibration run, at least one run. If the samples do not fill the last batch, the first
    samples fill it. The program's `parameters` may be fewer than the model's inputs. Raises ServeError
    (INVALID_ARGUMENT) if the data cannot be read, or do not fit the inputs."""
    inputs, rows = {}, 0
    for name, tensor in parameters.items():
        if varies(tensor):
            raise invalid_argument(f"input '{name}' cannot be calibrated, because its shape is not fixed")
        inputs[name] = spec = client_tensor(name, "input", tensor, recipe.source.kind is SourceKind.TENSORFLOW)
        if recipe.batch_size:
            rows, *shape = spec.shape
            inputs[name] = replace(spec, shape=tuple(shape))
    samples = read_samples(model_folder, recipe.options, recipe.input_shapes, inputs)
    count = len(next(iter(samples.values())))
    runs = []
    for start in range(0, count, rows or 1):
        # Indices beyond the last sample wrap around to the first.
        chosen = np.arange(start, start + rows) % count if rows else start
        run = {name: samples[name][chosen] for name in inputs}
        if recipe.source.kind is SourceKind.TENSORFLOW:
            run = {name: program_view(array) for name, array in run.items()}
        runs.append({name: np.ascontiguousarray(array) for name, array in run.items()})
    return runs


def read_samples(
    model_folder: Path, options: CompileOptions, names: Collection[str], inputs: Mapping[str, TensorSpec]
) -> Mapping[str, Array]:
    """Return [samples, *shape] for each input: equally many samples of each, at least one. `inputs` have the shapes of
    one sample, without the batch. `names`: the model's inputs, which may be more than `inputs`. Raises ServeError
    (INVALID_ARGUMENT) if the data cannot be read, or do not fit the inputs."""
    data = calibration_data(options, model_folder)
    if not inputs:
        raise invalid_argument("a model without inputs cannot be calibrated; remove its precision")
    return _Reader(model_folder, data, options, names, inputs).read()


@dataclass(frozen=True, slots=True)
class _Reader:
    model_folder: Path
    data: Path
    options: CompileOptions
    names: Collection[str]
    inputs: Mapping[str, TensorSpec]

    def read(self) -> dict[str, Array]:
        if self.data.is_dir():
            samples = self._read_folder()
        elif zipfile.is_zipfile(self.data):
            samples = {}
            try:
                with np.load(self.data, allow_pickle=False) as arrays:
                    self._check_names(arrays.keys())
                    most = self.options.calibration_samples
                    for name, tensor in self.inputs.items():
                        samples[name] = self._stack(tensor, arrays[name], self.data.name)[:most]
            except ServeError:
                raise
            except Exception as error:
                # numpy raises almost any exception for a damaged file.
                raise self._wrong(f"cannot be read as an .npz file: {error}") from None
        elif self.data.suffix == ".npy" and len(self.inputs) == 1:
            ((name, tensor),) = self.inputs.items()
            samples = {name: self._read_arrays(tensor, [self.data])}
        else:
            raise self._wrong("must be an .npz file, an .npy file for one input, or a folder of .npy files or images")
        counts = {len(array) for array in samples.values()}
        if len(counts) != 1 or 0 in counts:
            shown = ", ".join(f"{len(array)} of '{name}'" for name, array in samples.items())
            raise self._wrong(f"must have as many samples of each input, and at least one; it has {shown or 'none'}")
        for name, array in samples.items():
            if not np.isfinite(array).all():
                raise self._wrong(f"has NaN or infinite values for input '{name}', which cannot set a scale")
        return samples

    def _read_folder(self) -> dict[str, Array]:
        folders = {entry.name for entry in self.data.iterdir() if entry.is_dir() and not entry.name.startswith(".")}
        if folders and (len(self.names) > 1 or folders <= set(self.names)):
            self._check_names(name for name in self.names if (self.data / name).is_dir())
            files_of = {name: self._files(name) for name in self.inputs}
            return {name: self._read_arrays(tensor, files_of[name]) for name, tensor in self.inputs.items()}
        if len(self.inputs) != 1:
            raise self._wrong(f"must have a folder for each input ({', '.join(sorted(self.inputs))})")
        ((name, tensor),) = self.inputs.items()
        files = self._files()
        images = [file for file in files if file.suffix.lower() in (".jpg", ".jpeg", ".png")]
        arrays = [file for file in files if file.suffix == ".npy"]
        if images and arrays:
            raise self._wrong(f"holds both images ({images[0].name}) and arrays ({arrays[0].name}); keep only one kind")
        if not images:
            return {name: self._read_arrays(tensor, files)}
        pipeline = calibration_pipeline(self.options, self.model_folder)
        if pipeline is None:
            raise self._wrong(f"holds images, but there is no rocAL pipeline to make inputs of them; {PIPELINE_HINT}")
        # A sample of four dimensions is several images.
        holds_images = len(tensor.shape) == IMAGE_RANK
        images_per_sample, shape = (tensor.shape[0], tensor.shape[1:]) if holds_images else (1, tensor.shape)
        used_count = min(len(images), self.options.calibration_samples) // images_per_sample * images_per_sample
        if not used_count:
            raise self._wrong(f"must have at least {images_per_sample} images, the number that input '{name}' holds")
        prepared = prepare_images(images[:used_count], pipeline, name, shape, tensor.datatype.numpy_dtype)
        return {name: np.stack(prepared).reshape(-1, *tensor.shape)}

    def _read_arrays(self, tensor: TensorSpec, files: Sequence[Path]) -> Array:
        arrays: list[Array] = []
        for file in files:
            if file.suffix == ".npy" and sum(map(len, arrays)) < self.options.calibration_samples:
                try:
                    array = np.load(file, allow_pickle=False)
                except Exception as error:
                    raise self._wrong(f"has file {file.name}, which cannot be read as an array: {error}") from None
                arrays.append(self._stack(tensor, array, file.name))
        if not arrays:
            raise self._wrong(f"has no .npy files for input '{tensor.name}'")
        return np.concatenate(arrays)[: self.options.calibration_samples]

    def _stack(self, tensor: TensorSpec, array: Any, source: str) -> Array:
        """Return the array as [samples, *shape]. The array is one sample, or several."""
        if not isinstance(array, np.ndarray) or array.dtype != tensor.datatype.numpy_dtype:
            found = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
            raise self._wrong(
                f"has {found} for input '{tensor.name}' ({source}), expected {tensor.datatype.numpy_dtype}"
            )
        if array.shape == tensor.shape:
            return array[np.newaxis]
        if array.shape[1:] == tensor.shape and array.ndim == len(tensor.shape) + 1:
            return array
        several = ", ".join(map(str, ("samples", *tensor.shape)))
        raise self._wrong(
            f"has shape {list(array.shape)} for input '{tensor.name}' ({source}), expected {list(tensor.shape)} or, for"
            f" several samples, [{several}]"
        )

    def _files(self, name: str = "") -> list[Path]:
        """List the files of the calibration folder, or of its subfolder `name`, by name; hidden files are left out."""
        roots = (self.model_folder,)
        folder = path_within(self.data, name, roots, _ERROR_PREFIX) if name else self.data
        names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
        return [path_within(folder, one, roots, _ERROR_PREFIX) for one in names]

    def _check_names(self, found: Iterable[str]) -> None:
        present = set(found)
        missing = sorted(self.inputs.keys() - present)
        unknown = sorted(present.difference(self.names))
        if missing or unknown:
            faults = [f"{verb} '{names[0]}'" for verb, names in (("lacks", missing), ("has", unknown)) if names]
            wrong = " and ".join(faults)
            raise self._wrong(f"must have the model's inputs ({', '.join(self.names)}); it {wrong}")

    def _wrong(self, text: str) -> ServeError:
        return invalid_argument(f"calibration_data '{self.options.calibration_data}' {text}")
