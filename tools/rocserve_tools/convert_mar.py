"""Runs `rocserve convert-mar`: writes a model folder from an archive of TorchServe's torch-model-archiver."""

from __future__ import annotations

import json
import re
import shutil
import zipfile
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rocserve.backends.pytorch.model_file import FileKind, file_kind, most_unpacked
from rocserve.config.model_folder import is_version_name
from rocserve.core.datatypes import DataType
from rocserve.core.errors import invalid_argument, unavailable
from rocserve.core.model_config import InputConfig
from rocserve.settings.flag import Kind, flag, number, positional, repeated
from rocserve.verbs.printing import console_on, say
from rocserve.verbs.verb import Verb

_MANIFEST = "MAR-INF/MANIFEST.json"
_LABELS = "index_to_name.json"
_IMAGE_CLASSIFIER = "image_classifier"
"""TorchServe's handler that resizes to 256, crops to 224 and normalises, like `preprocess` "imagenet"."""
_PIXELS = "INPUT__0:FP32:3,224,224"


def _input(text: str) -> InputConfig:
    name, _, rest = text.partition(":")
    datatype, _, dims = rest.partition(":")
    with suppress(ValueError):
        made = InputConfig(name, DataType(datatype), tuple(int(size) for size in dims.split(",")))
        if name and all(size == -1 or size > 0 for size in made.dims):
            return made
    raise ValueError(f"expected NAME:DATATYPE:DIMS such as {_PIXELS}, got '{text}'")


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    archive: Path = positional(Path(), Kind("MODEL.mar", Path), "an archive of torch-model-archiver")
    model_repository: Path = flag(
        Path(), Kind("DIR", Path), "the repository to write the model's folder into", required=True
    )
    inputs: tuple[InputConfig, ...] = repeated(
        Kind("NAME:DATATYPE:DIMS", _input),
        f"an input of a TorchScript program, without the batch dimension, e.g. {_PIXELS}",
        name="input",
    )
    max_batch_size: int = flag(
        8, number("ROWS", 0), "max_batch_size of a TorchScript program; 0 = its inputs have no batch dimension"
    )


def run(options: ConvertOptions) -> None:
    """Write the model folder. Raises ServeError: INVALID_ARGUMENT if the archive holds no program that can be served,
    UNAVAILABLE if the folder cannot be written."""
    try:
        with zipfile.ZipFile(options.archive) as archive:
            _convert(archive, options)
    except (
        zipfile.BadZipFile, zlib.error, EOFError, OSError, LookupError, ValueError, TypeError, AttributeError,
        RuntimeError,
    ) as error:  # fmt: skip
        raise invalid_argument(f"expected an archive of torch-model-archiver, with {_MANIFEST}: {error}") from None


def _convert(archive: zipfile.ZipFile, options: ConvertOptions) -> None:
    size, most = sum(member.file_size for member in archive.infolist()), most_unpacked(options.archive)
    if size > most:
        raise invalid_argument(
            f"{options.archive.name} unpacks to {size >> 20} MiB, at most {most >> 20} MiB are possible for its size"
        )
    manifest: dict[str, Any] = json.loads(archive.read(_MANIFEST))["model"]
    name, source, handler = manifest["modelName"], manifest.get("serializedFile", ""), manifest.get("handler", "")
    ending = Path(source).suffix
    if ending not in (".pt", ".pt2", ".pth", ".onnx"):
        raise invalid_argument(
            f"model '{name}' has the file '{source}'; expected TorchScript, a program of torch.export or ONNX"
        )
    if not re.fullmatch(r"[\w.-]+", name) or name.startswith("."):
        raise invalid_argument(f"'{name}' cannot be the name of a folder")
    version = int(str(manifest.get("modelVersion", "1")).partition(".")[0])
    if not is_version_name(str(version)):
        raise invalid_argument(f"model '{name}' has the version {version}; a folder's is from 0 up to 63 bits")
    folder = options.model_repository / name
    file = folder / str(version) / ("model.pt" if ending == ".pth" else f"model{ending}")
    with TemporaryDirectory() as scratch:
        program = Path(scratch, file.name)
        with archive.open(source) as packed, program.open("wb") as written:
            shutil.copyfileobj(packed, written)
        needs_inputs = ending != ".onnx" and file_kind(program) is not FileKind.EXPORTED
        lines = _configuration(options, handler, needs_inputs)
        texts: dict[str, list[str]] = {}
        # If the program describes its outputs itself, only `preprocess` reads the labels.
        if (needs_inputs or handler == _IMAGE_CLASSIFIER) and (labels := _labels(archive)):
            texts["labels.txt"] = labels
            if needs_inputs:
                output = f'name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ {len(labels)} ] label_filename: "labels.txt"'
                lines.append(f"output {{ {output} }}")
        texts["config.pbtxt"] = lines
        # Writing starts only after everything has been read, so an unreadable archive leaves no files.
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            for filename, written_lines in texts.items():
                if written_lines:
                    (folder / filename).write_text("\n".join(written_lines) + "\n")
            shutil.move(program, file)
        except OSError as error:
            raise unavailable(f"cannot write {folder}: {error.strerror or error}") from None
    out = console_on()
    say(out, f"{folder}: version {version}, {file.name}")
    if handler and handler != _IMAGE_CLASSIFIER:
        say(out, f"handler '{handler}' is not converted: its steps become a pipeline or a Python model of an ensemble")


def _labels(archive: zipfile.ZipFile) -> list[str]:
    """Return the class names, each on one line; empty if the archive has none."""
    if _LABELS not in archive.namelist():
        return []
    try:
        names = json.loads(archive.read(_LABELS))
        # An entry is "0": "cat" or, as in ImageNet's file, "0": ["n02123045", "tabby"].
        ordered = [names[str(number)] for number in range(len(names))]
        return [" ".join((label if isinstance(label, str) else str(label[-1])).split()) for label in ordered]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise invalid_argument(
            f'{_LABELS} is expected to name each class, as in {{"0": "cat", "1": "dog"}}:'
            f" {type(error).__name__}: {error}"
        ) from None


def _configuration(options: ConvertOptions, handler: str, needs_inputs: bool) -> list[str]:
    lines = []
    if needs_inputs:
        inputs = options.inputs or ((_input(_PIXELS),) if handler == _IMAGE_CLASSIFIER else ())
        if not inputs:
            raise invalid_argument(
                f"TorchScript does not name its inputs: name each, as in --input={_PIXELS}, without the batch dimension"
            )
        lines += ['platform: "pytorch_libtorch"', f"max_batch_size: {options.max_batch_size}"]
        for one in inputs:
            name = json.dumps(one.name, ensure_ascii=False)
            datatype = "STRING" if one.datatype is DataType.BYTES else one.datatype.value
            lines.append(f"input {{ name: {name} data_type: TYPE_{datatype} dims: {list(one.dims)} }}")
    if handler == _IMAGE_CLASSIFIER:
        lines.append('parameters { key: "preprocess" value { string_value: "imagenet" } }')
    return lines


VERB = Verb(
    "Write a model's folder from an archive of TorchServe: the program (TorchScript, torch.export or ONNX), a"
    " configuration if the program needs one, and the labels. Of handlers only image_classifier is converted.",
    ConvertOptions(),
    run,
    lambda options: options.archive,
)
