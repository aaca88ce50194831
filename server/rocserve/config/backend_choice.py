"""Which backend serves a configuration, and which file of a version folder is its model."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from rocserve.backends.base import BackendSpec
from rocserve.backends.registry import BackendRegistry
from rocserve.config.model_folder import Listing, ModelFolder
from rocserve.config.pbtxt import suggest
from rocserve.core.errors import ServeError, StatusCode, invalid_argument
from rocserve.protocol.model_config_pb2 import ModelConfig

_TO_ONNX = "export the model to ONNX and use platform 'onnx_onnxv1'"
_NVIDIAS = "such engines run on NVIDIA's GPUs only; serve the ONNX model that it was made from"
_OWN_SERVER = "serve it with that project's own server, or call it in a Python model"
_FOREIGN = {
    "vitis_xmodel": "such models run on FPGAs only; serve the ONNX model that it was made from",
    "amdinfer_cpp": "it is a library against AMD Inference Server's own C++ interface; write it as a Python model",
    "pytorch_torchscript": "use platform 'pytorch_libtorch'",
    "tensorrt_plan": _NVIDIAS,
    "tensorrt": _NVIDIAS,
    "tensorflow_savedmodel": "convert the model to ONNX and use platform 'onnx_onnxv1'",
    "openvino": "serve the ONNX model that it was made from",
    "fil": "convert the trees to ONNX (onnxmltools) and use platform 'onnx_onnxv1'",
    "dali": "write the pipeline for platform 'rocal_json'",
    "vllm": _OWN_SERVER,
    "tensorrtllm": _OWN_SERVER,
}
"""Platforms and backends of other servers whose models are often met, with the way out."""

_TRITON_BACKENDS = {
    "tensorrt_plan": "tensorrt",
    "tensorflow_savedmodel": "tensorflow",
}
"""The backends that Triton finds by these platforms."""


class UnknownBackend(ServeError):
    """`backend` names none: the configuration can be read, but no version of the model be loaded."""


def choose_backend(
    message: ModelConfig, registry: BackendRegistry, folder: ModelFolder, *, strict: bool
) -> BackendSpec:
    """The backend that `platform` and `backend` name; when both are empty, the one whose model file is there.

    Args:
        strict: the files are not read.

    Raises:
        UnknownBackend: there is no such `backend`, or `platform` one of Triton's alone.
        ServeError: INVALID_ARGUMENT when there is none, when the two disagree, or when files of several are there.
    """
    if not message.platform and not message.backend:
        if strict:
            raise invalid_argument(f"must specify 'platform' or 'backend' for '{message.name}'")
        return _backend_of_files(message, registry, folder)
    by_platform = registry.find(message.platform, "") if message.platform else None
    by_backend = registry.find("", message.backend) if message.backend else None
    if message.backend and by_backend is None:
        raise _unknown_backend(message, registry, message.backend, message.backend)
    # Of a backend that Triton does not know itself, the platform is no more than a word for its metadata.
    is_free = by_backend is not None and by_backend.answers_requests
    if message.platform in _TRITON_BACKENDS and by_platform is None and not is_free:
        raise _unknown_backend(message, registry, _TRITON_BACKENDS[message.platform], message.platform)
    if message.platform and by_platform is None and by_backend is None:
        raise _unknown_platform(message, registry)
    if message.platform and message.backend and by_platform is not by_backend and not is_free:
        raise invalid_argument(
            f"unexpected 'platform' and 'backend' pair, got:{message.platform}, {message.backend} (model"
            f" '{message.name}'); remove one of them"
        )
    found = by_backend or by_platform
    assert found is not None
    return found


def model_filenames(message: ModelConfig, backend: BackendSpec) -> tuple[str, ...]:
    """The names under which a version folder may hold the model, best first; "*.json" means the one such file."""
    return (message.default_model_filename,) if message.default_model_filename else backend.model_filenames


def matching_files(place: Listing, filenames: Iterable[str]) -> tuple[str, ...]:
    """The files (or folders, for models that are one) of the first name that matches any; no pattern matches hidden
    ones."""
    for filename in filenames:
        if any(character in filename for character in "*?["):
            matches = tuple(name for name in place.visible if fnmatchcase(name, filename))
        else:
            matches = (filename,) if place.has(filename) else ()
        if matches:
            return matches
    return ()


def fill_backend_fields(
    message: ModelConfig, backend: BackendSpec, folder: ModelFolder, filenames: Iterable[str]
) -> None:
    """Write `platform`, `backend` and, where one file is the model, `default_model_filename` where they are empty."""
    if not backend.answers_requests:
        # Triton leaves that of Python models empty, as they may say one of their own.
        message.platform = message.platform or backend.platforms[0]
    message.backend = message.backend or backend.name
    if message.default_model_filename:
        return
    for place in folder.places:
        matches = matching_files(place, filenames)
        if len(matches) == 1:
            message.default_model_filename = matches[0]
            return


_WEIGHTS = re.compile(r"\.(pth|safetensors|bin)\b")
_WEIGHTS_ADVICE = (
    "; such files hold weights without the network: write it as a program with torch.export.save(torch.export.export("
    "model.eval(), inputs), 'model.pt2'), or write a model.py that loads it"
)
_SHOWN_NAMES = 20
"""Of a folder's files, in a text."""


def describe_files(place: Listing) -> str:
    """What lies in a folder, for errors."""
    names = place.visible
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(names[:_SHOWN_NAMES]) + more or "no files"


def _backend_of_files(message: ModelConfig, registry: BackendRegistry, folder: ModelFolder) -> BackendSpec:
    reason = f"must specify 'platform' or 'backend' for '{message.name}'"
    if message.default_model_filename:
        candidates = [spec for spec in registry.backends if _names_file(spec, message.default_model_filename)]
        where = f"default_model_filename '{message.default_model_filename}'"
    else:
        place = folder.places[0]
        candidates = _backends_of_folder(place, registry)
        where = f"the files in {place.path.name}/ ({describe_files(place)})"
    if len(candidates) == 1:
        return candidates[0]
    known = "; ".join(f"{spec.name}: {', '.join(spec.model_filenames)}" for spec in registry.backends)
    if candidates:
        names = ", ".join(spec.name for spec in candidates)
        raise invalid_argument(f"{reason}: {where} fit several backends: {names}")
    advice = _WEIGHTS_ADVICE if _WEIGHTS.search(where) else ""
    raise invalid_argument(f"{reason}: {where} fit no backend (known model files: {known}){advice}")


def _backends_of_folder(place: Listing, registry: BackendRegistry) -> list[BackendSpec]:
    """Backends with a model file by its exact name; when there is none, those whose pattern matches one file."""
    exact = [
        spec
        for spec in registry.backends
        if matching_files(place, [name for name in spec.model_filenames if "*" not in name])
    ]
    return exact or [spec for spec in registry.backends if len(matching_files(place, spec.model_filenames)) == 1]


def _names_file(spec: BackendSpec, filename: str) -> bool:
    suffix = Path(filename).suffix
    return suffix.lower() in spec.file_endings or any(Path(known).suffix == suffix for known in spec.model_filenames)


def _unknown_backend(message: ModelConfig, registry: BackendRegistry, backend: str, written: str) -> ServeError:
    return UnknownBackend(
        StatusCode.INVALID_ARGUMENT,
        f"unable to find backend library for backend '{backend}', try specifying runtime on the model"
        f" configuration. Model '{message.name}'{_way_out(written, registry)}",
    )


def _unknown_platform(message: ModelConfig, registry: BackendRegistry) -> ServeError:
    return invalid_argument(
        f"unexpected platform type '{message.platform}' for {message.name}{_way_out(message.platform, registry)}"
    )


def _way_out(name: str, registry: BackendRegistry) -> str:
    return f"; {_FOREIGN[name]}" if name in _FOREIGN else suggest(name, registry.platforms)
