"""AMD Inference Server's configurations as ModelConfig messages.

They are config.toml, one model or the stages of a chain as [[models]], and config.pbtxt with `inputs`, `outputs`,
`datatype: "FP32"`, `shape: [...]`. Field names and numbers of that one are those of its message `inference.Config`; the
message is built here, under another package, so that nothing of that name stands in any descriptor pool.

Its shapes are those of one item, and its workers batch: so a translated model has a max_batch_size, which falls to 0
when the loaded model turns out not to batch.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from rocserve.backends.registry import ENSEMBLE_PLATFORM
from rocserve.config.datatypes import type_number
from rocserve.config.pbtxt import parse_text
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.protocol.model_config_pb2 import ModelConfig, ModelInput, ModelOutput

_NAMES = {datatype.value: datatype for datatype in DataType}


@dataclass(frozen=True, slots=True)
class AmdTensor:
    name: str
    datatype: DataType
    shape: tuple[int, ...]
    """Of one item, without a batch dimension."""
    id: str = ""
    """The link of a chain: an input takes the output of the same id; empty means the client."""


@dataclass(frozen=True, slots=True)
class AmdModel:
    name: str
    platform: str
    inputs: tuple[AmdTensor, ...]
    outputs: tuple[AmdTensor, ...]
    id: str = ""
    """In a chain: the name of the stage's model file."""
    parameters: dict[str, str] = field(default_factory=dict)


def parse_datatype(name: str, where: str) -> DataType:
    """A datatype as those files write it: "FP32" or "Fp32".

    Raises:
        ServeError: INVALID_ARGUMENT for an unknown one.
    """
    datatype = _NAMES.get(name.upper())
    if datatype is None:
        raise invalid_argument(f"{where}: unknown datatype '{name}'; expected one of: {', '.join(_NAMES)}")
    return datatype


_POSITION = re.compile(r" \(at (?:line (?P<line>\d+), column (?P<column>\d+)|end of document)\)$")
_MODEL_KEYS = {"name", "platform", "id", "inputs", "outputs"}
_TENSOR_KEYS = {"name", "datatype", "shape", "id"}


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """The document of a TOML file.

    Raises:
        ServeError: INVALID_ARGUMENT with file, line and column.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        match = _POSITION.search(str(error))
        last_line = text.split("\n")
        line = int(match["line"]) if match and match["line"] else len(last_line)
        column = int(match["column"]) if match and match["column"] else len(last_line[-1]) + 1
        reason = _POSITION.sub("", str(error))
        raise invalid_argument(f"{source}:{line}:{column}: {reason[:1].lower()}{reason[1:]}") from None
    except RecursionError:
        raise invalid_argument(f"{source}: nested too deeply") from None


def is_amd_toml(document: Mapping[str, Any]) -> bool:
    """Whether a TOML document is a model's configuration, and not some other file that lies beside it."""
    return "models" in document or {"name", "platform"} <= document.keys()


def read_amd_toml(document: Mapping[str, Any], source: str) -> tuple[tuple[AmdModel, ...], tuple[str, ...]]:
    """The models of a document in their order, and warnings about keys without meaning.

    Raises:
        ServeError: INVALID_ARGUMENT that names the key that is missing or wrong.
    """
    warnings: list[str] = []
    top = _Table(document, source, "", warnings)
    if "models" in document:
        top.warn_of_unknown({"models"})
        return tuple(_toml_model(stage, id_required=True) for stage in top.tables("models")), tuple(warnings)
    return (_toml_model(top, id_required=False),), tuple(warnings)


@dataclass(frozen=True, slots=True)
class _Table:
    """A TOML table, and where it stands in the document, for errors."""

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
        if not isinstance(value, list) or not all(type(item) is int for item in value):
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


def _toml_model(table: _Table, *, id_required: bool) -> AmdModel:
    table.warn_of_unknown(_MODEL_KEYS)
    return AmdModel(
        name=table.string("name"),
        platform=table.string("platform"),
        id=table.string("id", required=id_required),
        inputs=tuple(_toml_tensor(tensor) for tensor in table.tables("inputs")),
        outputs=tuple(_toml_tensor(tensor) for tensor in table.tables("outputs")),
    )


def _toml_tensor(table: _Table) -> AmdTensor:
    table.warn_of_unknown(_TENSOR_KEYS)
    return AmdTensor(
        name=table.string("name"),
        datatype=parse_datatype(table.string("datatype"), table.where),
        shape=table.integers("shape"),
        id=table.string("id", required=False),
    )


_PACKAGE = "rocserve.amd"
_COMMENT = re.compile(r"#[^\n]*")
_THEIRS = re.compile(r"(?m)^\s*(?:inputs|outputs)\s*[:\[{<]")
_TRITONS = re.compile(r"\b(?:input|output|data_type|dims|max_batch_size|instance_group|dynamic_batching)\s*[:\[{<]")


def is_amd_pbtxt(text: str) -> bool:
    """Whether a text that is no ModelConfig is meant as this dialect."""
    bare = _COMMENT.sub("", text)
    return bool(_THEIRS.search(bare)) and not _TRITONS.search(bare)


def parse_amd_pbtxt(text: str, source: str) -> AmdModel:
    """The one model of a file.

    Raises:
        ServeError: INVALID_ARGUMENT with file, line and column, or with the field that is missing or wrong.
    """
    config = _config_class()()
    parse_text(text, config, source)
    for name in ("name", "platform", "inputs", "outputs"):
        if not getattr(config, name):
            raise invalid_argument(f"{source}: the configuration must have '{name}'")
    return AmdModel(
        name=config.name,
        platform=config.platform,
        inputs=tuple(_pbtxt_tensor(tensor, f"{source}: inputs") for tensor in config.inputs),
        outputs=tuple(_pbtxt_tensor(tensor, f"{source}: outputs") for tensor in config.outputs),
        parameters={key: _parameter(value) for key, value in sorted(config.parameters.items())},
    )


def _pbtxt_tensor(tensor: Any, where: str) -> AmdTensor:
    where = f"{where} '{tensor.name}'"
    return AmdTensor(tensor.name, parse_datatype(tensor.datatype, where), tuple(tensor.shape))


def _parameter(value: Any) -> str:
    choice = value.WhichOneof("parameter_choice")
    given = getattr(value, choice) if choice else ""
    return str(given).lower() if isinstance(given, bool) else str(given)


@functools.cache
def _config_class() -> Any:
    types = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="rocserve/amd.proto", package=_PACKAGE, syntax="proto3")
    value = file.message_type.add(name="Parameter")
    value.oneof_decl.add(name="parameter_choice")
    for number, (name, kind) in enumerate(
        (
            ("bool_param", types.TYPE_BOOL),
            ("int64_param", types.TYPE_INT64),
            ("string_param", types.TYPE_STRING),
            ("double_param", types.TYPE_DOUBLE),
        ),
        start=1,
    ):
        _add_field(value, number, name, kind, oneof_index=0)
    config = file.message_type.add(name="Config")
    tensor = config.nested_type.add(name="TensorMetadata")
    _add_field(tensor, 1, "name", types.TYPE_STRING)
    _add_field(tensor, 2, "datatype", types.TYPE_STRING)
    _add_field(tensor, 3, "shape", types.TYPE_INT64, repeated=True)
    entry = config.nested_type.add(name="ParametersEntry", options={"map_entry": True})
    _add_field(entry, 1, "key", types.TYPE_STRING)
    _add_field(entry, 2, "value", types.TYPE_MESSAGE, type_name="Parameter")
    _add_field(config, 1, "name", types.TYPE_STRING)
    _add_field(config, 2, "versions", types.TYPE_STRING, repeated=True)
    _add_field(config, 3, "platform", types.TYPE_STRING)
    _add_field(config, 4, "inputs", types.TYPE_MESSAGE, repeated=True, type_name="Config.TensorMetadata")
    _add_field(config, 5, "outputs", types.TYPE_MESSAGE, repeated=True, type_name="Config.TensorMetadata")
    _add_field(config, 6, "parameters", types.TYPE_MESSAGE, repeated=True, type_name="Config.ParametersEntry")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.Config"))


def _add_field(
    message: descriptor_pb2.DescriptorProto,
    number: int,
    name: str,
    kind: descriptor_pb2.FieldDescriptorProto.Type.ValueType,
    *,
    repeated: bool = False,
    type_name: str = "",
    oneof_index: int | None = None,
) -> None:
    labels = descriptor_pb2.FieldDescriptorProto
    field = message.field.add(
        name=name, number=number, type=kind, label=labels.LABEL_REPEATED if repeated else labels.LABEL_OPTIONAL
    )
    if type_name:
        field.type_name = f".{_PACKAGE}.{type_name}"
    if oneof_index is not None:
        field.oneof_index = oneof_index


@dataclass(frozen=True, slots=True)
class ChainStep:
    member: str
    """The name under which the stage is served."""
    stage: AmdModel
    input_map: dict[str, str]
    """The stage's input -> the tensor of the ensemble."""
    output_map: dict[str, str]


@dataclass(frozen=True, slots=True)
class Chain:
    """The steps, and the tensors that the client gives and gets (under their names in the ensemble)."""

    steps: tuple[ChainStep, ...]
    inputs: tuple[tuple[str, AmdTensor], ...]
    outputs: tuple[tuple[str, AmdTensor], ...]


def link(stages: Sequence[AmdModel], name: str, source: str) -> Chain:
    """Join the stages: an input takes the output of the same id; other ends belong to the client.

    Raises:
        ServeError: INVALID_ARGUMENT when the ids do not make a chain.
    """
    written = _written_ids(stages, source)
    read = {tensor.id for stage in stages for tensor in stage.inputs if tensor.id}
    inner = written & read
    inputs: dict[str, AmdTensor] = {}
    outputs: dict[str, AmdTensor] = {}
    steps = []
    for index, (stage, member) in enumerate(zip(stages, _member_names(stages, name), strict=True)):
        where = f"{source}: models[{index}] ('{stage.name}')"
        input_map = {}
        for tensor in stage.inputs:
            if tensor.id in inner:
                input_map[tensor.name] = _inner_name(tensor.id)
                continue
            if index > 0 and tensor.id:
                raise invalid_argument(
                    f"{where}: input '{tensor.name}' has id '{tensor.id}', which no output has; ids of outputs:"
                    f" {', '.join(sorted(written)) or 'none'}"
                )
            _add_end(inputs, tensor, "inputs", where)
            input_map[tensor.name] = tensor.name
        output_map = {}
        for tensor in stage.outputs:
            if tensor.id in inner:
                output_map[tensor.name] = _inner_name(tensor.id)
                continue
            end = _output_name(tensor, inputs, where)
            _add_end(outputs, tensor, "outputs", where, end)
            output_map[tensor.name] = end
        steps.append(ChainStep(member, stage, input_map, output_map))
    if not inputs or not outputs:
        end = "input" if not inputs else "output"
        raise invalid_argument(f"{source}: every {end} is linked to another stage; leave one with an empty id")
    return Chain(tuple(steps), tuple(inputs.items()), tuple(outputs.items()))


def _written_ids(stages: Sequence[AmdModel], source: str) -> set[str]:
    ids = [tensor.id for stage in stages for tensor in stage.outputs if tensor.id]
    for tensor_id, count in Counter(ids).items():
        if count > 1:
            raise invalid_argument(f"{source}: {count} outputs have the id '{tensor_id}'; each id may stand once")
    return set(ids)


def _inner_name(tensor_id: str) -> str:
    """A tensor between stages; the prefix keeps it apart from the names of the client's tensors."""
    return f"id:{tensor_id}"


def _output_name(tensor: AmdTensor, inputs: dict[str, AmdTensor], where: str) -> str:
    """An ensemble's tensors share one space of names, so an output named as an input goes by its id."""
    if tensor.name not in inputs:
        return tensor.name
    if tensor.id and tensor.id not in inputs:
        return tensor.id
    raise invalid_argument(
        f"{where}: output '{tensor.name}' has the name of an input of the chain; give it an id of its own, under which"
        " it will be answered"
    )


def _add_end(ends: dict[str, AmdTensor], tensor: AmdTensor, what: str, where: str, name: str = "") -> None:
    name = name or tensor.name
    if name in ends:
        raise invalid_argument(f"{where}: the chain would have two {what} named '{name}'; rename one or link it by id")
    ends[name] = tensor


def _member_names(stages: Sequence[AmdModel], name: str) -> list[str]:
    """<chain>_<stem of the stage's file>; the stage's place is added where two stages share a file."""
    stems = [PurePosixPath(stage.id).stem for stage in stages]
    shared = {stem for stem, count in Counter(stems).items() if count > 1}
    return [f"{name}_{stem}_{index}" if stem in shared else f"{name}_{stem}" for index, stem in enumerate(stems)]


BATCH_SIZE = 64
"""The batch of AMD Inference Server's MIGraphX and rocAL workers, unless the parameter `batch` says otherwise."""

_EXTENSIONS = {
    "tensorflow_graphdef": ".pb",
    "onnx_onnxv1": ".onnx",
    "migraphx_mxr": ".mxr",
    "rocal_json": ".json",
}
"""A single model's file may have any name; its platform tells the extension."""


@dataclass(frozen=True, slots=True)
class TranslatedModel:
    message: ModelConfig
    model_filenames: tuple[str, ...]
    """Names or patterns of the model's file; empty for an ensemble."""


def translate(models: Sequence[AmdModel], name: str, source: str) -> tuple[TranslatedModel, ...]:
    """One model, or for a chain the ensemble, which bears the folder's name, followed by its members.

    Raises:
        ServeError: INVALID_ARGUMENT for a name that is not the folder's, or a chain whose ids do not join.
    """
    if models[0].name != name:
        first = "; the first model of a chain names the chain" if len(models) > 1 else ""
        raise invalid_argument(
            f"unexpected directory name '{name}' for model '{models[0].name}', directory name must equal model name"
            f"{first}"
        )
    if len(models) == 1:
        return (_translated(models[0], name, source),)
    chain = link(models, name, source)
    members = tuple(_translated(step.stage, step.member, source) for step in chain.steps)
    ensemble = ModelConfig(name=name, platform=ENSEMBLE_PLATFORM)
    ensemble.max_batch_size = min(member.message.max_batch_size for member in members)
    for end, tensor in chain.inputs:
        _fill(ensemble.input.add(), tensor, end)
    for end, tensor in chain.outputs:
        _fill(ensemble.output.add(), tensor, end)
    for step in chain.steps:
        ensemble.ensemble_scheduling.step.add(
            model_name=step.member, model_version=-1, input_map=step.input_map, output_map=step.output_map
        )
    return (TranslatedModel(ensemble, ()), *members)


def _translated(model: AmdModel, name: str, source: str) -> TranslatedModel:
    message = ModelConfig(name=name, platform=model.platform, default_model_filename=model.id)
    message.max_batch_size = _batch_size(model, source)
    if message.max_batch_size > 1:
        message.dynamic_batching.SetInParent()
    for tensor in model.inputs:
        _fill(message.input.add(), tensor, tensor.name)
    for tensor in model.outputs:
        _fill(message.output.add(), tensor, tensor.name)
    for key, value in model.parameters.items():
        # `batch` too: MIGraphX compiles the one size that it says.
        message.parameters[key].string_value = value
    extension = _EXTENSIONS.get(model.platform)
    filenames = (model.id,) if model.id else (f"*{extension}",) if extension else ()
    return TranslatedModel(message, filenames)


def _batch_size(model: AmdModel, source: str) -> int:
    text = model.parameters.get("batch", str(BATCH_SIZE))
    if not text.isdecimal() or not 1 <= int(text) < 2**31:
        raise invalid_argument(f"{source}: parameter 'batch' must be a positive integer, got '{text}'")
    return int(text)


def _fill(tensor: ModelInput | ModelOutput, given: AmdTensor, name: str) -> None:
    tensor.name = name
    tensor.data_type = type_number(given.datatype)
    tensor.dims.extend(given.shape or (1,))
    if not given.shape:
        tensor.reshape.SetInParent()
