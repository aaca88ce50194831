"""Finds a model folder's configuration, in whatever dialect it is written, and reads it as ModelConfig messages."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rocserve.config.amd.model import AmdModel
from rocserve.config.amd.pbtxt import is_amd_pbtxt, parse_amd_pbtxt
from rocserve.config.amd.toml import is_amd_toml, parse_toml, read_amd_toml
from rocserve.config.amd.translation import translate
from rocserve.config.model_folder import ModelFolder
from rocserve.config.override import REQUEST_SOURCE, parse_override
from rocserve.config.pbtxt import parse_model_config, read_text
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.protocol.model_config_pb2 import ModelConfig

CONFIG_FILENAME = "config.pbtxt"
TOML_FILENAME = "config.toml"
CONFIGS_FOLDER = "configs"
"""Holds the configurations that --model-config-name chooses from."""
_WHAT = "configuration file"


class Dialect(enum.Enum):
    TRITON = "triton"
    AMD = "amd"
    """AMD Inference Server's: tensors are only described, so the loaded model's own are taken where they differ."""


@dataclass(frozen=True, slots=True)
class WrittenModel:
    """A configuration as its author wrote it; nothing is completed or checked yet."""

    message: ModelConfig
    model_filenames: tuple[str, ...] = ()
    """Names or patterns of the model's file that the dialect demands; empty: the backend's."""


@dataclass(frozen=True, slots=True)
class WrittenConfig:
    models: tuple[WrittenModel, ...]
    dialect: Dialect
    source: str
    """The file's name in the model folder, or what stands in its place."""
    warnings: tuple[str, ...] = ()


def read_written_config(
    folder: ModelFolder,
    name: str,
    *,
    config_name: str,
    strict: bool,
    override_json: str | None,
    is_alone: bool = False,
) -> WrittenConfig:
    """The configuration of a model folder.

    In this order: the override; configs/<config_name>.pbtxt; config.pbtxt; config.toml (before a config.pbtxt of
    AMD Inference Server, as there); the one other .toml or .pbtxt file; nothing, for the model to tell all itself.
    `is_alone`: the folder is not the model's own, so that no other file is meant than config.pbtxt.

    Raises:
        ServeError: INVALID_ARGUMENT when the file is wrong, or when there is none and `strict`.
    """
    if override_json is not None:
        return _triton(parse_override(override_json), REQUEST_SOURCE)
    if is_alone and not folder.listing.has_file(CONFIG_FILENAME):
        return _no_file(folder, strict)
    if config_name:
        path = folder.find(f"{CONFIGS_FOLDER}/{config_name}.pbtxt", _WHAT)
        if path is not None:
            return _read_pbtxt(path, name)
    pbtxt = folder.find(CONFIG_FILENAME, _WHAT)
    toml = folder.find(TOML_FILENAME, _WHAT)
    if pbtxt is not None:
        written = _read_pbtxt(pbtxt, name)
        if toml is None or written.dialect is Dialect.TRITON:
            return written
    if toml is not None:
        return _read_toml(toml, parse_toml(read_text(toml), toml.name), name)
    return _read_other_file(folder, name, strict)


def _triton(message: ModelConfig, source: str) -> WrittenConfig:
    return WrittenConfig((WrittenModel(message),), Dialect.TRITON, source)


def _read_pbtxt(path: Path, name: str) -> WrittenConfig:
    text = read_text(path)
    try:
        return _triton(parse_model_config(text, path.name), path.name)
    except ServeError:
        if not is_amd_pbtxt(text):
            raise
    return _amd((parse_amd_pbtxt(text, path.name),), name, path.name)


def _read_toml(path: Path, document: dict[str, object], name: str) -> WrittenConfig:
    models, warnings = read_amd_toml(document, path.name)
    return _amd(models, name, path.name, warnings)


def _amd(models: Sequence[AmdModel], name: str, source: str, warnings: tuple[str, ...] = ()) -> WrittenConfig:
    translated = translate(models, name, source)
    written = tuple(WrittenModel(model.message, model.model_filenames) for model in translated)
    return WrittenConfig(written, Dialect.AMD, source, warnings)


def _read_other_file(folder: ModelFolder, name: str, strict: bool) -> WrittenConfig:
    """AMD Inference Server lets the file have any name; other TOML files that lie there are left alone."""
    found: list[tuple[Path, dict[str, object] | None]] = []
    for filename in _visible_files(folder, ".toml"):
        path = folder.resolve(filename, _WHAT)
        document = _document_or_none(path)
        if document is not None and is_amd_toml(document):
            found.append((path, document))
    # As there: TOML goes before pbtxt.
    if not found:
        found = [(folder.resolve(filename, _WHAT), None) for filename in _visible_files(folder, ".pbtxt")]
    if len(found) > 1:
        names = ", ".join(path.name for path, _ in found)
        raise invalid_argument(
            f"model '{name}' has several configuration files: {names}; name the right one {CONFIG_FILENAME}"
        )
    if found:
        path, document = found[0]
        return _read_pbtxt(path, name) if document is None else _read_toml(path, document, name)
    return _no_file(folder, strict)


def _no_file(folder: ModelFolder, strict: bool) -> WrittenConfig:
    if strict:
        raise invalid_argument(
            f"failed to open text file for read {folder.path / CONFIG_FILENAME}: No such file or directory; without"
            " auto-complete every model needs it"
        )
    return _triton(ModelConfig(), "no configuration file")


def _document_or_none(path: Path) -> dict[str, object] | None:
    try:
        return parse_toml(read_text(path), path.name)
    except ServeError:
        return None


def _visible_files(folder: ModelFolder, suffix: str) -> list[str]:
    listing = folder.listing
    if listing.error:
        raise invalid_argument(f"failed to read the model folder {folder.path}: {listing.error}")
    return [name for name in listing.visible if name.endswith(suffix) and listing.has_file(name)]
