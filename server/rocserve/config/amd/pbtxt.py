"""AMD Inference Server's config.pbtxt: `inputs`, `outputs`, `datatype: "FP32"`, `shape: [...]`, one model a file.

Field names and numbers are those of its message `inference.Config`; the message is built here, under another package,
so that nothing of that name stands in any descriptor pool.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from rocserve.config.amd.model import AmdModel, AmdTensor, parse_datatype
from rocserve.config.pbtxt import parse_text
from rocserve.core.errors import invalid_argument

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
    for field in ("name", "platform", "inputs", "outputs"):
        if not getattr(config, field):
            raise invalid_argument(f"{source}: the configuration must have '{field}'")
    return AmdModel(
        name=config.name,
        platform=config.platform,
        inputs=tuple(_tensor(tensor, f"{source}: inputs") for tensor in config.inputs),
        outputs=tuple(_tensor(tensor, f"{source}: outputs") for tensor in config.outputs),
        parameters={key: _parameter(value) for key, value in sorted(config.parameters.items())},
    )


def _tensor(tensor: Any, where: str) -> AmdTensor:
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
