"""Writes a choice into the model's config.pbtxt."""

from __future__ import annotations

import stat
from pathlib import Path

from rocserve.config.completion import normalise
from rocserve.config.pbtxt import parse_model_config, read_text
from rocserve.config.sources import CONFIG_FILENAME, CONFIGS_FOLDER, Dialect
from rocserve.config.validation import check_model_config
from rocserve.core.errors import invalid_argument, unavailable
from rocserve.tools.model_choice import ToolModel
from rocserve.tools.printing import replacing
from rocserve.tools.tune.config_text import ServingChoice, with_choice

_USUAL_MODE = 0o644


def config_path(model: ToolModel, config_name: str) -> Path:
    """The file that says how the model is served; it need not be there yet.

    Raises:
        ServeError: INVALID_ARGUMENT; there is none that could be written.
    """
    definition = model.definition
    if definition is None:
        raise invalid_argument("--write: a bare file has no config.pbtxt; give a model's folder")
    if definition.dialect is not Dialect.TRITON:
        raise invalid_argument(
            f"--write: {definition.source} is written for AMD Inference Server, which has no fields for the choice;"
            f" `rocserve config` prints it as a {CONFIG_FILENAME}"
        )
    if "batch" in definition.config.parameters:
        raise invalid_argument(
            "--write: the parameter 'batch' names the one batch size, which contradicts a choice; remove it first"
        )
    named = definition.folder / CONFIGS_FOLDER / f"{config_name}.pbtxt"
    if config_name and named.is_file():
        return named.resolve()
    found = definition.folder / definition.source
    return found.resolve() if found.is_file() else definition.folder / CONFIG_FILENAME


def write_choice(path: Path, model: ToolModel, choice: ServingChoice) -> None:
    """Replace the file in one step; a server that watches sees the one or the other.

    Raises:
        ServeError: the choice cannot be written into it; it is as it was.
    """
    before = read_text(path) if path.exists() else f'backend: "{model.backend.name}"\n'
    text = with_choice(before, choice, path.name)
    message = parse_model_config(text, path.name)
    message.name = message.name or model.source.name
    if not message.platform and not message.backend:
        message.backend = model.backend.name
    normalise(message, model.backend)
    check_model_config(message)
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else _USUAL_MODE
    try:
        with replacing(path, mode) as file:
            file.write(text.encode())
    except OSError as error:
        raise unavailable(f"cannot write {path}: {error.strerror or error}") from None
