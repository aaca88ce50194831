"""Translates AMD Inference Server's configurations to ModelConfig messages. These are config.toml, one model or the
stages of a chain as [[models]], and config.pbtxt with `inputs`, `outputs`, `datatype: "FP32"`, `shape: [...]`. Their
shapes are those of one item, and that server's workers batch. A translated model therefore has a max_batch_size, which
becomes 0 if the loaded model cannot batch."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from rocserve.backends.registry import ENSEMBLE_PLATFORM
from rocserve.config.datatypes import type_number
from rocserve.config.pbtxt import parse_text, read_text
from rocserve.config.written import WrittenConfig
from rocserve.core.datatypes import DATATYPES, DataType
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.protocol.amd_config_pb2 import Config
from rocserve.protocol.model_config_pb2 import ModelConfig, ModelInput, ModelOutput


@dataclass(frozen=True, slots=True)
class _Stage:
    """A model in a configuration, perhaps a stage of a chain."""

    message: ModelConfig
    input_ids: Sequence[str]
    """The inputs' ids, in their order: an input takes the output with the same id; "" = the client sends it."""
    output_ids: Sequence[str]


def _datatype(name: str, where: str) -> DataType:
    """Return the datatype of "FP32" or "Fp32". Raises ServeError (INVALID_ARGUMENT) for an unknown one."""
    datatype = DATATYPES.get(name.upper())
    if datatype is None:
        raise invalid_argument(f"{where}: unknown datatype '{name}'; expected one of: {', '.join(DATATYPES)}")
    return datatype


def is_toml(path: Path) -> bool:
    """Return whether a TOML file is a model's configuration, not another file in the folder."""
    try:
        document = _toml_document(path)
    except ServeError:
        return False
    return "models" in document or {"name", "platform"} <= document.keys()


def _toml_document(path: Path) -> dict[str, Any]:
    """Raises ServeError (INVALID_ARGUMENT) with file, line and column."""
    source, text = path.name, read_text(path)
    lines = text.split("\n")
    most_bytes = 64 << 10
    longest_line = 2048
    if len(text) > most_bytes or max(map(len, lines)) > longest_line:
        # tomllib takes quadratic time for a key with dots, and Python refuses to parse numbers of more than 4300
        # digits. Both stand on one line.
        raise invalid_argument(
            f"{source}: expected at most {most_bytes} characters, in lines of at most {longest_line}"
        )
    position = re.compile(r" \(at (?:line (?P<line>\d+), column (?P<column>\d+)|end of document)\)$")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        match = position.search(str(error))
        line = int(match["line"]) if match and match["line"] else len(lines)
        column = int(match["column"]) if match and match["column"] else len(lines[-1]) + 1
        reason = position.sub("", str(error))
        raise invalid_argument(f"{source}:{line}:{column}: {reason[:1].lower()}{reason[1:]}") from None
    except RecursionError:
        raise invalid_argument(f"{source}: nested too deeply") from None


def read_toml(path: Path, name: str) -> WrittenConfig:
    """Return the models of a file, with warnings of keys without effect. Raises ServeError (INVALID_ARGUMENT)."""
    document = _toml_document(path)
    warnings: list[str] = []
    top = _Table(document, path.name, "", warnings)
    if "models" in document:
        top.warn_of_unknown({"models"})
        models = [_toml_model(stage, id_required=True) for stage in top.tables("models")]
    else:
        models = [_toml_model(top, id_required=False)]
    return _translated(models, name, path.name, tuple(warnings))


@dataclass(frozen=True, slots=True)
class _Table:
    """A TOML table, with its place in the document for errors."""

    values: Mapping[str, Any]
    source: str
    path: str
    warnings: list[str]

    def string(self, key: str, *, required: bool = True) -> str:
        value = self.values.get(key)
        if value is None and not required:
            return ""
        if not isinstance(value, str) or (required and not value):
            raise self.wrong(key, "a string that is not empty", value)
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        value = self.values.get(key)
        # bool is an int to isinstance.
        if not isinstance(value, list) or not all(type(item) is int and item.bit_length() < 64 for item in value):
            raise self.wrong(key, "an array of integers", value)
        return tuple(value)

    def tables(self, key: str) -> list[_Table]:
        value = self.values.get(key)
        if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
            raise self.wrong(key, f"an array of tables ([[{key}]]) with at least one", value)
        prefix = f"{self.path}.{key}" if self.path else key
        return [_Table(item, self.source, f"{prefix}[{index}]", self.warnings) for index, item in enumerate(value)]

    def warn_of_unknown(self, known: set[str]) -> None:
        unknown = sorted(set(self.values) - known)
        if unknown:
            self.warnings.append(f"{self.where}: keys without effect: {', '.join(unknown)}")

    def wrong(self, key: str, expected: str, value: object) -> ServeError:
        if value is None:
            return invalid_argument(f"{self.where}: the configuration must have '{key}', {expected}")
        return invalid_argument(f"{self.where}: '{key}' must be {expected}, got {value!r}")

    @property
    def where(self) -> str:
        return f"{self.source}: {self.path}" if self.path else self.source


def _toml_model(table: _Table, *, id_required: bool) -> _Stage:
    table.warn_of_unknown({"name", "platform", "id", "inputs", "outputs"})
    name, platform, file = table.string("name"), table.string("platform"), table.string("id", required=id_required)
    message = model_message(name, platform, table.source, {}, file)
    ids: list[list[str]] = []
    for key, tensors in (("inputs", message.input), ("outputs", message.output)):
        ids.append([])
        for tensor in table.tables(key):
            tensor.warn_of_unknown({"name", "datatype", "shape", "id"})
            of_tensor, written = tensor.string("name"), tensor.string("datatype")
            fill(tensors.add(), of_tensor, _datatype(written, tensor.where), tensor.integers("shape"))
            ids[-1].append(tensor.string("id", required=False))
    return _Stage(message, *ids)


def is_pbtxt(text: str) -> bool:
    """Return whether a text that is not a ModelConfig is in AMD Inference Server's dialect."""
    bare = re.sub(r"#[^\n]*", "", text)
    triton_field = r"\b(?:input|output|data_type|dims|max_batch_size|instance_group|dynamic_batching)\s*[:\[{<]"
    return bool(re.search(r"(?m)^[^\S\n]*(?:inputs|outputs)\s*[:\[{<]", bare)) and not re.search(triton_field, bare)


def read_pbtxt(text: str, name: str, source: str) -> WrittenConfig:
    """Return the model of a file. Raises ServeError (INVALID_ARGUMENT) with the position, or the field."""
    config = Config()
    parse_text(text, config, source)
    for required in ("name", "platform", "inputs", "outputs"):
        if not getattr(config, required):
            raise invalid_argument(f"{source}: the configuration must have '{required}'")
    parameters = {}
    for key, value in sorted(config.parameters.items()):
        choice = value.WhichOneof("parameter_choice")
        parameters[key] = parameter_text(getattr(value, choice)) if choice else ""
    message = model_message(config.name, config.platform, source, parameters)
    for what, written, tensors in (
        ("inputs", config.inputs, message.input),
        ("outputs", config.outputs, message.output),
    ):
        for one in written:
            fill(tensors.add(), one.name, _datatype(one.datatype, f"{source}: {what} '{one.name}'"), one.shape)
    return _translated([_Stage(message, (), ())], name, source)


def parameter_text(value: bool | float | str) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


BATCH_SIZE = 64
"""The batch of AMD Inference Server's MIGraphX and rocAL workers, unless the parameter `batch` sets another."""


def _translated(stages: Sequence[_Stage], name: str, source: str, warnings: tuple[str, ...] = ()) -> WrittenConfig:
    """Return one model; or for a chain an ensemble with the folder's name, then its members. Raises ServeError
    (INVALID_ARGUMENT) if the model's name differs from the folder's, or a chain's ids do not join."""
    messages = [stage.message for stage in stages]
    if messages[0].name != name:
        first = "; the first model of a chain names the chain" if len(stages) > 1 else ""
        raise invalid_argument(
            f"unexpected directory name '{name}' for model '{messages[0].name}', directory name must equal model name"
            f"{first}"
        )
    filenames: tuple[str, ...] = ()
    if len(stages) == 1:
        # Platform -> ending of the model's file, because a single model's file may have any name.
        extensions = {
            "tensorflow_graphdef": ".pb",
            "onnx_onnxv1": ".onnx",
            "migraphx_mxr": ".mxr",
            "rocal_json": ".json",
        }
        filenames = (f"*{extension}",) if (extension := extensions.get(messages[0].platform)) else ()
    else:
        # <chain>_<stem of the stage's file>; with the stage's index if two stages share a file.
        stems = [PurePosixPath(message.default_model_filename).stem for message in messages]
        shared = {stem for stem, count in Counter(stems).items() if count > 1}
        names = [f"{name}_{stem}_{index}" if stem in shared else f"{name}_{stem}" for index, stem in enumerate(stems)]
        ensemble = _ensemble(stages, names, name, source)
        for message, member in zip(messages, names, strict=True):
            message.name = member
        messages.insert(0, ensemble)
    return WrittenConfig(tuple(messages), source, warnings, is_amd=True, model_filenames=filenames)


def model_message(
    name: str, platform: str, source: str, parameters: Mapping[str, str], filename: str = ""
) -> ModelConfig:
    """Return a model without tensors. Raises ServeError (INVALID_ARGUMENT) if the parameter `batch` is invalid."""
    batch = parameters.get("batch", str(BATCH_SIZE))
    # As many digits as 2**31 has, because Python refuses to parse thousands of digits.
    if not (batch.isdecimal() and len(batch) <= 10 and 1 <= int(batch) < 2**31):
        raise invalid_argument(f"{source}: parameter 'batch' must be a positive integer, got '{batch}'")
    message = ModelConfig(name=name, platform=platform, default_model_filename=filename, max_batch_size=int(batch))
    if message.max_batch_size > 1:
        message.dynamic_batching.SetInParent()
    for key, value in parameters.items():
        # Includes `batch`, because MIGraphX compiles that one size.
        message.parameters[key].string_value = value
    return message


def fill(tensor: ModelInput | ModelOutput, name: str, datatype: DataType, shape: Sequence[int]) -> None:
    """Fill a tensor's message. `shape`: the shape of one item, without a batch dimension."""
    tensor.name, tensor.data_type = name, type_number(datatype)
    tensor.dims.extend(shape or (1,))
    if not shape:
        tensor.reshape.SetInParent()


def _ensemble(stages: Sequence[_Stage], members: Sequence[str], name: str, source: str) -> ModelConfig:
    """Return the ensemble of the stages: an input takes the output with the same id; all other inputs and outputs
    belong to the client. Raises ServeError (INVALID_ARGUMENT) if the ids do not make a chain."""
    written = Counter(one for stage in stages for one in stage.output_ids if one)
    for tensor_id, count in written.items():
        if count > 1:
            raise invalid_argument(f"{source}: {count} outputs have the id '{tensor_id}'; each id may occur once")
    inner = written.keys() & {one for stage in stages for one in stage.input_ids if one}
    ensemble = ModelConfig(name=name, platform=ENSEMBLE_PLATFORM)
    ensemble.max_batch_size = min(stage.message.max_batch_size for stage in stages)
    for index, (stage, member) in enumerate(zip(stages, members, strict=True)):
        where = f"{source}: models[{index}] ('{stage.message.name}')"
        step = ensemble.ensemble_scheduling.step.add(model_name=member, model_version=-1)
        for what, ids, names in (
            ("input", stage.input_ids, step.input_map),
            ("output", stage.output_ids, step.output_map),
        ):
            for tensor, link in zip(getattr(stage.message, what), ids, strict=True):
                if link in inner:
                    # The prefix avoids the names of the client's tensors.
                    names[tensor.name] = f"id:{link}"
                    continue
                end = tensor.name
                if what == "input" and index > 0 and link:
                    raise invalid_argument(
                        f"{where}: input '{end}' has id '{link}', which no output has; ids of outputs:"
                        f" {', '.join(sorted(written)) or 'none'}"
                    )
                # An ensemble's tensors share one namespace, so an output with an input's name is named by its id.
                input_names = {one.name for one in ensemble.input}
                if what == "output" and end in input_names:
                    end = link
                    if not end or end in input_names:
                        raise invalid_argument(
                            f"{where}: output '{tensor.name}' has the name of an input of the chain; give it an id,"
                            " which then names it in answers"
                        )
                ends = getattr(ensemble, what)
                if any(one.name == end for one in ends):
                    raise invalid_argument(
                        f"{where}: the chain would have two {what}s named '{end}'; rename one or link it by id"
                    )
                ends.add().CopyFrom(tensor)
                ends[-1].name = end
                names[tensor.name] = end
    if not ensemble.input or not ensemble.output:
        end = "output" if ensemble.input else "input"
        raise invalid_argument(f"{source}: every {end} is linked to another stage; leave one with an empty id")
    return ensemble
