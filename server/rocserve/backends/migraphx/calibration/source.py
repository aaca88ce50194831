"""Where a model's calibration data lies, without reading it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from rocserve.backends.contained_paths import path_within
from rocserve.backends.migraphx.configuration.options import CompileOptions
from rocserve.cache.digests import folder_digest
from rocserve.core.errors import invalid_argument

_DEFAULT_PIPELINE = "pipeline.json"


def calibration_data(options: CompileOptions, model_folder: Path) -> Path:
    """The file or folder; only where the precision needs it.

    Raises:
        ServeError: INVALID_ARGUMENT; there is none, or it is outside of the model's folder.
    """
    path = path_within(model_folder, options.calibration_data, (model_folder,), "calibration_data")
    if not path.exists():
        raise invalid_argument(
            f"calibration_data '{options.calibration_data}' is not in the model's folder; copy it there, before the"
            " configuration"
        )
    return path


def calibration_pipeline(options: CompileOptions, model_folder: Path) -> Path | None:
    """The rocAL pipeline for images; None where there is none.

    Raises:
        ServeError: INVALID_ARGUMENT; the one that is named is not there, or outside of the model's folder.
    """
    name = options.calibration_pipeline or _DEFAULT_PIPELINE
    path = path_within(model_folder, name, (model_folder,), "calibration_pipeline")
    if path.is_file():
        return path
    if options.calibration_pipeline:
        raise invalid_argument(f"calibration_pipeline '{name}' is not a file in the model's folder; copy it there")
    return None


def calibration_digest(options: CompileOptions, model_folder: Path) -> str:
    """SHA-256 over the data and the pipeline; "" where the precision needs none.

    Raises:
        ServeError: as `calibration_data` and `calibration_pipeline`.
    """
    if not options.precision.needs_calibration:
        return ""
    digests = [folder_digest(calibration_data(options, model_folder))]
    pipeline = calibration_pipeline(options, model_folder)
    if pipeline is not None:
        digests.append(folder_digest(pipeline))
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()
