"""Chooses the backend of a model: by its configuration, else by its files."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from shlex import quote

from rocserve.backends.base import BackendSpec
from rocserve.backends.registry import ENSEMBLE_PLATFORM, BackendRegistry
from rocserve.config.model_folder import Listing, ModelFolder
from rocserve.config.pbtxt import suggest
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.protocol.model_config_pb2 import ModelConfig


def choose_backend(
    message: ModelConfig, registry: BackendRegistry, folder: ModelFolder, *, strict: bool
) -> BackendSpec | ServeError | None:
    """Return the backend that `platform` and `backend` name, or whose model file is present if both are empty. None for
    an ensemble, whose platform may be empty. Returns an error if the backend does not exist here: the configuration is
    readable, but no version can be loaded. `strict`: ignore the files. Raises ServeError (INVALID_ARGUMENT) if nothing
    fits, if several backends fit, or if platform and backend disagree."""
    platform, backend = message.platform, message.backend
    unnamed = not platform and not backend
    if platform == ENSEMBLE_PLATFORM or (unnamed and message.HasField("ensemble_scheduling")):
        return None
    if unnamed:
        reason = f"must specify 'platform' or 'backend' for '{message.name}'"
        if strict:
            raise invalid_argument(reason)
        return _backend_of_files(message, registry, folder, reason)
    by_platform = registry.find(platform, "") if platform else None
    by_backend = registry.find("", backend) if backend else None
    # For a Python model, the platform is only metadata.
    is_free = by_backend is not None and by_backend.answers_requests
    lacks_backend = bool(backend) and by_backend is None
    # Triton's backends of these platforms.
    triton_backends = {"tensorrt_plan": "tensorrt", "tensorflow_savedmodel": "tensorflow"}
    if lacks_backend or (platform in triton_backends and by_platform is None and not is_free):
        return invalid_argument(
            f"unable to find backend library for backend '{backend if lacks_backend else triton_backends[platform]}',"
            f" try specifying runtime on the model configuration. Model '{message.name}'"
            f"{_foreign_advice(backend if lacks_backend else platform, registry)}"
        )
    found = by_backend or by_platform
    if found is None:
        raise invalid_argument(
            f"unexpected platform type '{platform}' for {message.name}{_foreign_advice(platform, registry)}"
        )
    if platform and backend and by_platform is not by_backend and not is_free:
        raise invalid_argument(
            f"unexpected 'platform' and 'backend' pair, got:{platform}, {backend} (model '{message.name}'); remove one"
            " of them"
        )
    return found


def _backend_of_files(message: ModelConfig, registry: BackendRegistry, folder: ModelFolder, reason: str) -> BackendSpec:
    """Return the backend that fits the model's file. `reason` begins the error, ServeError (INVALID_ARGUMENT)."""
    if message.default_model_filename == "saved_model.pb":
        raise _saved_model_refused(message, folder, "saved_model.pb")
    if message.default_model_filename:
        ending = Path(message.default_model_filename).suffix
        candidates = [
            spec
            for spec in registry.backends
            if ending.lower() in spec.file_endings or any(Path(name).suffix == ending for name in spec.model_filenames)
        ]
        where = f"default_model_filename '{message.default_model_filename}'"
    else:
        place = folder.places[0]
        # Backends with a file of their exact name come first, then backends whose pattern matches one file.
        exact = {spec.name: [name for name in spec.model_filenames if "*" not in name] for spec in registry.backends}
        candidates = [spec for spec in registry.backends if matching_files(place, exact[spec.name])] or [
            spec for spec in registry.backends if len(matching_files(place, spec.model_filenames)) == 1
        ]
        where = f"the files in {place.path.name}/ ({describe_files(place)})"
    if len(candidates) == 1:
        return candidates[0]
    known = "; ".join(f"{spec.name}: {', '.join(spec.model_filenames)}" for spec in registry.backends)
    if candidates:
        names = ", ".join(spec.name for spec in candidates)
        raise invalid_argument(f"{reason}: {where} fit several backends: {names}")
    for name in () if message.default_model_filename else folder.places[0].visible:
        if name == "saved_model.pb" or name.endswith(".savedmodel"):
            raise _saved_model_refused(message, folder, name)
    advice = advice_on_files(where)
    if not message.default_model_filename:
        advice = advice or _renaming(folder.places[0], registry)
    raise invalid_argument(f"{reason}: {where} fit no backend (known model files: {known}){advice}")


def advice_on_files(names: str) -> str:
    """Return the end of an error text about files with these names; "" = no framework that needs a conversion, or keeps
    the network elsewhere, writes such files."""
    if re.search(r"\.(pkl|pickle|joblib|cbm|ubj|h5|keras|tflite)\b", names):
        return (
            "; convert such a model to ONNX, with skl2onnx (scikit-learn), onnxmltools (XGBoost, LightGBM), CatBoost's"
            " save_model(..., format='onnx') or tf2onnx (Keras, TensorFlow Lite), or write a model.py that loads it"
        )
    if not re.search(r"\.(pth|safetensors|bin)\b", names):
        return ""
    return (
        "; such files hold weights without the network: write it as a program with"
        " torch.export.save(torch.export.export(model.eval(), inputs), 'model.pt2'), or write a model.py that loads it"
    )


def _renaming(place: Listing, registry: BackendRegistry) -> str:
    """Return the command that renames the only file to the name for its ending; "" = no such file."""
    names = {Path(name).suffix: name for spec in registry.backends for name in spec.model_filenames if "*" not in name}
    file = place.path / place.visible[0] if len(place.visible) == 1 else None
    if file is None or file.suffix not in names:
        return ""
    return f"; repair it with: mv {quote(str(file))} {quote(str(place.path / names[file.suffix]))}"


def matching_files(place: Listing, filenames: Iterable[str]) -> tuple[str, ...]:
    """Return the files or folders that match the first name with any match. Patterns match no hidden names."""
    for filename in filenames:
        if any(character in filename for character in "*?["):
            matches = tuple(name for name in place.visible if fnmatchcase(name, filename))
        else:
            matches = (filename,) if place.has(filename) else ()
        if matches:
            return matches
    return ()


def describe_files(place: Listing) -> str:
    """List a folder's files for an error."""
    names = place.visible
    # File names listed in an error.
    most = 20
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more or "no files"


def _saved_model_refused(message: ModelConfig, folder: ModelFolder, name: str) -> ServeError:
    """Return the error of TensorFlow's folder of a graph and its variables."""
    place = folder.places[0]
    where = "the folder" if place is folder.listing else f"{place.path.name}/"
    return invalid_argument(
        f"{where} of model '{message.name}' holds a TensorFlow SavedModel ({name}), which no backend reads: convert it"
        " with python -m tf2onnx.convert --saved-model FOLDER --output model.onnx, and serve model.onnx"
    )


def _foreign_advice(name: str, registry: BackendRegistry) -> str:
    nvidias = "such engines run on NVIDIA GPUs only; serve the original ONNX model"
    own_server = "serve it with that project's own server, or call it in a Python model"
    trees = "convert the trees to ONNX (onnxmltools) and use platform 'onnx_onnxv1'"
    # Frequent platforms and backends of other servers.
    known = {
        "vitis_xmodel": "such models run on FPGAs only; serve the original ONNX model",
        "amdinfer_cpp": "it is a library for AMD Inference Server's C++ interface; rewrite it as a Python model",
        "pytorch_torchscript": "use platform 'pytorch_libtorch'",
        "tensorrt_plan": nvidias,
        "tensorrt": nvidias,
        "tensorflow_savedmodel": "convert the model to ONNX and use platform 'onnx_onnxv1'",
        "openvino": "serve the original ONNX model",
        **dict.fromkeys(("fil", "xgboost", "lightgbm"), trees),
        "sklearn": "convert the model to ONNX (skl2onnx) and use platform 'onnx_onnxv1'",
        "dali": "write the pipeline for platform 'rocal_json'",
        "vllm": own_server,
        "tensorrtllm": own_server,
    }
    return f"; {known[name]}" if name in known else suggest(name, registry.platforms)


def fill_backend_fields(
    message: ModelConfig, backend: BackendSpec, folder: ModelFolder, filenames: Iterable[str]
) -> None:
    """Fill `platform`, `backend` and, if exactly one file is the model, `default_model_filename`, if they are empty."""
    if not backend.answers_requests:
        # Triton leaves a Python model's platform empty, because the model may set one.
        message.platform = message.platform or backend.platforms[0]
    message.backend = message.backend or backend.name
    if message.default_model_filename:
        return
    for place in folder.places:
        matches = matching_files(place, filenames)
        if len(matches) == 1:
            message.default_model_filename = matches[0]
            return
