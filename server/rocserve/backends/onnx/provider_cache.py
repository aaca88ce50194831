"""Where ONNX Runtime's providers keep what they have compiled: a folder for each model and way of compiling it.

The providers' own names for their files do not depend on the weights, nor on the precision: with one folder for all, a
model that was replaced would go on with its old weights.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import onnxruntime

from rocserve.backends.base import ModelSource
from rocserve.backends.onnx.external_weights import ExternalWeights
from rocserve.backends.onnx.migraphx_provider import MIGRAPHX_PROVIDER
from rocserve.backends.onnx.providers import Provider, ProviderPlan
from rocserve.cache.digests import file_digest
from rocserve.cache.directory import cache_directory
from rocserve.cache.folders import trim_folders
from rocserve.cache.private_folder import make_private
from rocserve.core.errors import unavailable

_MIGRAPHX_VARIABLE = "ORT_MIGRAPHX_MODEL_CACHE_PATH"
"""Takes precedence over the option, which older versions of the provider lack."""
_FOLDER = "onnxruntime"
_NAME_DIGITS = 32
_OWN_NAME = re.compile(f"(?:migraphx|openvino)-[0-9a-f]{{{_NAME_DIGITS}}}")


def with_caches(model: ModelSource, plan: ProviderPlan, weights: ExternalWeights) -> ProviderPlan:
    """The plan with a folder for each provider that keeps what it compiles. Sets environment variables of this process.

    Raises:
        ServeError: UNAVAILABLE; the cache cannot be used.
    """
    if not any(provider.keeps_compiled for provider in plan.providers):
        return plan
    # Where AMD's image for Triton tells the provider to keep its files, they stay.
    named = os.environ.get(_MIGRAPHX_VARIABLE, "")
    place = Path(named) if named else cache_directory(model.settings) / _FOLDER
    contents = file_digest(model.model_file, tuple(weights.files.values()))
    providers = tuple(_with_cache(provider, place, contents) for provider in plan.providers)
    # Another server may be trimming the same folders.
    with suppress(OSError):
        # The last is the one that is about to be used.
        trim_folders(_folders(place), model.settings.cache_bytes)
    return replace(plan, providers=providers)


def _with_cache(provider: Provider, place: Path, contents: str) -> Provider:
    if not provider.keeps_compiled:
        return provider
    folder = place / _folder_name(provider, contents, os.environ)
    try:
        make_private(folder)
        os.utime(folder)
    except OSError as error:
        raise unavailable(
            f"the cache of compiled programs {folder} cannot be used: {error.strerror or error}; name another folder"
            " with --cache-directory"
        ) from None
    if provider.kind is MIGRAPHX_PROVIDER:
        os.environ[_MIGRAPHX_VARIABLE] = str(folder)
        return provider
    return replace(provider, options={**provider.options, "cache_dir": str(folder)})


def _folder_name(provider: Provider, contents: str, environment: Mapping[str, str]) -> str:
    """Of all that what is compiled depends on, as far as the provider itself does not look at it."""
    switches = {
        name: value
        for name, value in environment.items()
        if name.startswith(("ORT_MIGRAPHX_", "MIGRAPHX_")) and name != _MIGRAPHX_VARIABLE
    }
    parts = (contents, onnxruntime.__version__, provider.kind.provider, provider.options, switches)
    digest = hashlib.sha256(b"\0".join(_text(part) for part in parts)).hexdigest()
    return f"{provider.kind.accelerator}-{digest[:_NAME_DIGITS]}"


def _text(part: str | Mapping[str, str]) -> bytes:
    return part.encode() if isinstance(part, str) else repr(sorted(part.items())).encode()


def _folders(place: Path) -> Sequence[Path]:
    """Ours by their names: an operator's own place may hold others."""
    return [entry for entry in place.iterdir() if entry.is_dir() and _OWN_NAME.fullmatch(entry.name)]
