"""The `config` parameter of a load request: a ModelConfig as JSON that takes the place of the file."""

from __future__ import annotations

import json
import re

from google.protobuf import json_format

from rocserve.config.pbtxt import suggest
from rocserve.core.errors import invalid_argument
from rocserve.protocol.model_config_pb2 import ModelConfig

_NO_FIELD = re.compile(
    r'Message type "(?P<type>[\w.]+)" has no field named "(?P<name>[^"]*)"(?: at "(?P<path>[^"]*)")?'
)


def parse_override(text: str) -> ModelConfig:
    """A ModelConfig from its JSON form (protobuf's JSON mapping; unknown fields are errors).

    Raises:
        ServeError: INVALID_ARGUMENT, "Invalid config override: ...".
    """
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
        json_format.ParseDict(document, message, max_recursion_depth=20)
    except (json_format.Error, ValueError, TypeError) as error:
        raise invalid_argument(f"Invalid config override: {_explain(str(error), message)}") from None
    return message


def _explain(error: str, message: ModelConfig) -> str:
    match = _NO_FIELD.search(error)
    if match is None:
        return error.splitlines()[0]
    fields = message.DESCRIPTOR.file.pool.FindMessageTypeByName(match["type"]).fields_by_name
    type_name = match["type"].rsplit(".", 1)[-1]
    where = f" at {match['path']}" if match["path"] and match["path"] != type_name else ""
    return f"unknown field '{match['name']}' of {type_name}{where}{suggest(match['name'], fields)}"
