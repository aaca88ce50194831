"""The `config` parameter of a load request: a ModelConfig as JSON that takes the place of the file."""

from __future__ import annotations

import json
import re
from typing import Any

from google.protobuf import json_format

from rocserve.config.bounds import check_config_size
from rocserve.config.pbtxt import suggest, unknown_value
from rocserve.core.errors import invalid_argument
from rocserve.protocol.model_config_pb2 import ModelConfig

REQUEST_SOURCE = "the load request's config"
"""Where such a configuration comes from, in the place of a file's name."""

_NO_FIELD = re.compile(
    r'Message type "(?P<type>[\w.]+)" has no field named "(?P<name>[^"]*)"(?: at "(?P<path>[^"]*)")?'
)


def parse_override(text: str) -> ModelConfig:
    """A ModelConfig from its JSON form (protobuf's JSON mapping; unknown fields are errors).

    Raises:
        ServeError: INVALID_ARGUMENT, "Invalid config override: ...".
    """
    check_config_size(len(text), REQUEST_SOURCE)
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise invalid_argument(
            f"Invalid config override: not JSON: {error.msg} at line {error.lineno} column {error.colno}"
        ) from None
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
        raise invalid_argument(f"Invalid config override: {_explain(str(error), message)}") from None
    if fault := unknown_value(message):
        raise invalid_argument(f"Invalid config override: {fault}")
    return message


def _conforming(document: dict[str, Any], descriptor: Any) -> dict[str, Any]:
    """As Triton's parser takes it, where Python's would do otherwise: one element may stand for a list of one, and an
    empty list is no message."""
    by_name = {name: field for field in descriptor.fields for name in (field.name, field.json_name)}
    return {name: _conforming_value(name, value, by_name.get(name)) for name, value in document.items()}


def _conforming_value(name: str, value: Any, field: Any) -> Any:
    if field is None or value is None or field.message_type is None or field.message_type.GetOptions().map_entry:
        return value
    if not field.is_repeated:
        if isinstance(value, list):
            raise invalid_argument(f"Invalid config override: expected an object for '{name}', got a list")
        return _conforming(value, field.message_type) if isinstance(value, dict) else value
    elements = [value] if isinstance(value, dict) else value
    if not isinstance(elements, list):
        return elements
    return [_conforming(entry, field.message_type) if isinstance(entry, dict) else entry for entry in elements]


def _explain(error: str, message: ModelConfig) -> str:
    match = _NO_FIELD.search(error)
    if match is None:
        return error.splitlines()[0]
    fields = message.DESCRIPTOR.file.pool.FindMessageTypeByName(match["type"]).fields_by_name
    type_name = match["type"].rsplit(".", 1)[-1]
    where = f" at {match['path']}" if match["path"] and match["path"] != type_name else ""
    return f"unknown field '{match['name']}' of {type_name}{where}{suggest(match['name'], fields)}"
