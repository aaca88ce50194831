"""Runs `rocserve config MODEL_DIR`: prints the effective configuration of a model folder."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import logging
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from rocserve.backends.registry import BackendRegistry, discover_backends
from rocserve.config.definition import ModelDefinition, complete_definition
from rocserve.config.ensemble_checks import check_ensemble
from rocserve.config.model_folder import LABELS_FILENAME
from rocserve.config.pbtxt import format_model_config
from rocserve.config.preprocess.generated import GeneratedModel
from rocserve.config.preprocess.models import preset_models
from rocserve.config.preprocess.text_files import TOKENIZER
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.model_names import ModelKey
from rocserve.core.requests import Signature
from rocserve.presets import PREPROCESS
from rocserve.protocol import model_config_pb2 as messages
from rocserve.repository.engine_plan import EngineFailed, EnginePlan, load_on_engine
from rocserve.repository.load_order import LoadOrder
from rocserve.repository.machine import ThisMachine
from rocserve.settings import EngineSettings, engine_settings
from rocserve.settings.flag import FOLDER, SWITCH, Kind, flag, positional, text
from rocserve.verbs.model_choice import advised, newest_version, read_folder
from rocserve.verbs.verb import Verb
from rocserve.verbs.workers import ToolWorkers

_LOG = logging.getLogger("rocserve.config")


def describe(definition: ModelDefinition, version: int, settings: EngineSettings | None = None) -> Signature:
    """Load a version and return the signature that its engine reports. Progress goes to standard error. `settings`:
    None = the defaults. Raises ServeError."""
    return asyncio.run(_describe(definition, version, settings or engine_settings()))


async def _describe(definition: ModelDefinition, version: int, settings: EngineSettings) -> Signature:
    if definition.backend is None:
        raise invalid_argument(f"'{definition.name}' is an ensemble, which no engine loads")
    order = LoadOrder(definition, version, definition.folder / str(version))
    async with ToolWorkers(settings, _show_progress, _LOG, grace_seconds=1.0) as workers:

        async def signature(plan: EnginePlan) -> Signature:
            try:
                return (await workers.load(order, dataclasses.replace(plan, workers=plan.workers[:1]))).signature
            except ServeError as error:
                raise EngineFailed(error) from None

        return await load_on_engine(order, ThisMachine(settings), signature, _LOG)


def _show_progress(text: str) -> None:
    if sys.stderr.isatty():
        # Each line overwrites the previous one.
        shown = text[: shutil.get_terminal_size().columns - 1]
        print(f"\r\033[K{shown}", end="", file=sys.stderr, flush=True)


Describe = Callable[[ModelDefinition, int], Signature]
"""Loads a version and returns its signature. Raises ServeError if it cannot be loaded."""


@dataclass(frozen=True, slots=True)
class ConfigOptions:
    model_folder: Path = positional(Path(), Kind("MODEL_DIR", Path), "the model's folder")
    model_config_name: str = flag("", text("NAME"), "read configs/NAME.pbtxt instead of config.pbtxt, if it exists")
    strict: bool = flag(False, SWITCH, "do not complete the configuration from the model's file")
    save: Path | None = flag(None, FOLDER, "write the models that the parameter `preprocess` makes into this folder")


def run(options: ConfigOptions, registry: BackendRegistry | None = None, describe: Describe = describe) -> None:
    """Print each model of the folder as config.pbtxt, with comments on the completed fields, then the files of the
    models that `preprocess` makes from it. Raises ServeError if the configuration is wrong, OSError if a file cannot be
    written."""
    folder, strict = options.model_folder, options.strict
    if not folder.is_dir():
        raise invalid_argument("is not a folder; expected the folder of a model, as in a model repository")
    reading = read_folder(folder, registry or discover_backends(), options.model_config_name, strict=strict)
    with advised(reading):
        written = reading.written()
        definitions = reading.definitions(written)
        newest = {one.name: newest_version(one) for one in definitions if one.backend is not None}
    signatures = [describe(one, newest[one.name]) if one.name in newest else None for one in definitions]
    complete = [
        complete_definition(definition, signature, strict=strict)
        for definition, signature in zip(definitions, signatures, strict=True)
    ]
    # The members of a chain are in its own folder, so they can be checked; members of other ensembles are elsewhere.
    if len(complete) > 1:
        members = {ModelKey(definition.name): definition.config for definition in complete}
        for definition in complete:
            if definition.is_ensemble:
                check_ensemble(definition.config, members)
    texts = [
        _header(definition, before) + format_model_config(definition.message)
        for definition, before in zip(complete, written.models, strict=True)
    ]
    made: list[GeneratedModel] = []
    for definition in complete:
        if PREPROCESS in definition.config.parameters:
            version = reading.folder / ("" if definition.flat else str(newest[definition.name]))
            made += preset_models(definition.config, definition, version)
    print("\n".join(texts) + "".join(map(_printed, made)), end="")
    if options.save is not None:
        _save(made, options.save)
        print(f"# Written to {options.save}. Take '{PREPROCESS}' out of the model's parameters where these are served.")


def _save(made: Sequence[GeneratedModel], folder: Path) -> None:
    """Write all of the models, or none. Raises OSError if a model's folder exists or cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    for model in made:
        if (folder / model.name).exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder / model.name))
    with TemporaryDirectory(dir=folder, prefix=".") as new:
        for model in made:
            for path, content in model.files.items():
                file = Path(new) / model.name / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
        for model in made:
            (Path(new) / model.name).rename(folder / model.name)


def _printed(model: GeneratedModel) -> str:
    """Return the model's non-empty files as text; of labels and tokenizers only their size."""
    return "".join(f"\n# {model.name}/{path}{_content(path, data)}" for path, data in model.files.items() if data)


def _content(path: PurePosixPath, data: bytes) -> str:
    if path.name == LABELS_FILENAME:
        lines = data.count(b"\n")
        return f" ({lines} lines)\n"
    return f" ({len(data)} bytes)\n" if path.name == TOKENIZER else f"\n{data.decode()}"


def _header(definition: ModelDefinition, written: messages.ModelConfig) -> str:
    lines = [f"The effective configuration of model '{definition.name}' ({definition.source})."]
    before = {field.name: value for field, value in written.ListFields()}
    completed = [field.name for field, value in definition.message.ListFields() if before.get(field.name) != value]
    if completed:
        lines.append(f"Completed: {', '.join(completed)}.")
    lines += [f"Warning: {warning}" for warning in definition.warnings]
    lines += [f"Note: {note}" for note in definition.notes]
    return "".join(f"# {line}\n" for line in lines)


VERB = Verb(
    "Load a model, without a server, and print its configuration as the server would complete it.",
    ConfigOptions(),
    run,
    lambda options: options.model_folder,
)
