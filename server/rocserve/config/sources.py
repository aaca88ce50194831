"""Configuration sources: finds and reads a model folder's configuration in any dialect, or a load request's JSON."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from rocserve.amd_inference_server import configurations
from rocserve.config.bounds import check_config_size
from rocserve.config.model_folder import CONFIG_FILENAME, CONFIGS_FOLDER, TOML_FILENAME, ModelFolder
from rocserve.config.pbtxt import NO_FIELD, parse_model_config, read_text, unknown_field, unknown_value
from rocserve.config.written import WrittenConfig
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.protocol.model_config_pb2 import ModelConfig

REQUEST_SOURCE = "the load request's config"
"""Replaces a file's name in errors."""


def parse_override(text: str) -> ModelConfig:
    """Parse a ModelConfig from protobuf's JSON mapping; unknown fields are errors. Raises ServeError
    (INVALID_ARGUMENT), "Invalid config override: ..."."""
    check_config_size(len(text), REQUEST_SOURCE)
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise invalid_argument(
            f"Invalid config override: not JSON: {error.msg} at line {error.lineno} column {error.colno}"
        ) from None
    except ValueError:
        raise invalid_argument("Invalid config override: a number has too many digits") from None
    except RecursionError:
        raise invalid_argument("Invalid config override: nested too deeply") from None
    if not isinstance(document, dict):
        raise invalid_argument(
            f"Invalid config override: expected a JSON object of ModelConfig's fields, got {type(document).__name__}"
        )
    message = ModelConfig()
    try:
        json_format.ParseDict(_conforming(document, message.DESCRIPTOR), message, max_recursion_depth=20)
    except (json_format.Error, ValueError, TypeError) as error:
        found = NO_FIELD.search(str(error))
        fault = str(error).splitlines()[0] if found is None else unknown_field(found, message)
        raise invalid_argument(f"Invalid config override: {fault}") from None
    if fault := unknown_value(message):
        raise invalid_argument(f"Invalid config override: {fault}")
    return message


def _conforming(document: dict[str, Any], descriptor: Any) -> dict[str, Any]:
    """Adapt JSON to Triton's parser: an object may replace a list of one, but a list cannot replace an object
    (ServeError)."""
    by_name = {name: field for field in descriptor.fields for name in (field.name, field.json_name)}
    conforming = dict(document)
    for name, value in document.items():
        field = by_name.get(name)
        if field is None or (kind := field.message_type) is None or kind.GetOptions().map_entry:
            continue
        if isinstance(value, list) and not field.is_repeated:
            raise invalid_argument(f"Invalid config override: expected an object for '{name}', got a list")
        if isinstance(value, dict):
            conforming[name] = [_conforming(value, kind)] if field.is_repeated else _conforming(value, kind)
        elif isinstance(value, list):
            conforming[name] = [_conforming(one, kind) if isinstance(one, dict) else one for one in value]
    return conforming


NO_FILE = "no configuration file"
_WHAT = "configuration file"


def read_written_config(
    folder: ModelFolder,
    name: str,
    *,
    config_name: str,
    strict: bool,
    override_json: str | None,
    is_alone: bool = False,
) -> WrittenConfig:
    """Read the configuration of a model folder, from the first of: the override; configs/<config_name>.pbtxt;
    config.pbtxt; config.toml (before a config.pbtxt of AMD Inference Server, as in that server); the only other .toml
    or .pbtxt file; none, in which case the model reports everything. `is_alone`: the folder has files of other models,
    so only config.pbtxt counts. Raises ServeError (INVALID_ARGUMENT) if the file is wrong, or missing with `strict`."""
    if override_json is not None:
        return WrittenConfig((parse_override(override_json),), REQUEST_SOURCE)
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
        if toml is None or not written.is_amd:
            return written
    if toml is not None:
        return configurations.read_toml(toml, name)
    return _read_other_file(folder, name, strict)


def _read_pbtxt(path: Path, name: str) -> WrittenConfig:
    text = read_text(path)
    try:
        return WrittenConfig((parse_model_config(text, path.name),), path.name)
    except ServeError:
        if not configurations.is_pbtxt(text):
            raise
    return configurations.read_pbtxt(text, name, path.name)


def _read_other_file(folder: ModelFolder, name: str, strict: bool) -> WrittenConfig:
    """Read the only configuration of any name, as AMD Inference Server does. Other TOML files are ignored."""
    listing = folder.listing
    if listing.error:
        raise invalid_argument(f"failed to read the model folder {folder.path}: {listing.error}")
    endings = (".toml", ".pbtxt")
    files = [filename for filename in listing.visible if filename.endswith(endings) and listing.has_file(filename)]
    tomls = (folder.resolve(filename, _WHAT) for filename in files if filename.endswith(".toml"))
    # TOML first, as in AMD Inference Server.
    found = [path for path in tomls if configurations.is_toml(path)] or [
        folder.resolve(filename, _WHAT) for filename in files if filename.endswith(".pbtxt")
    ]
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise invalid_argument(
            f"model '{name}' has several configuration files: {names}; name the right one {CONFIG_FILENAME}"
        )
    if not found:
        return _no_file(folder, strict)
    return (configurations.read_toml if found[0].suffix == ".toml" else _read_pbtxt)(found[0], name)


def _no_file(folder: ModelFolder, strict: bool) -> WrittenConfig:
    if strict:
        raise invalid_argument(
            f"failed to open text file for read {folder.path / CONFIG_FILENAME}: No such file or directory; without"
            " auto-complete every model needs it"
        )
    # Such as config.pbtx or config.pbtxt.txt; the tokenizer's or engine's config.json is another file.
    named = difflib.get_close_matches(CONFIG_FILENAME, folder.listing.visible, n=1, cutoff=0.85)
    warnings = [f"'{name}' is not read: the configuration's name is {CONFIG_FILENAME}" for name in named]
    return WrittenConfig((ModelConfig(),), NO_FILE, tuple(warnings))
