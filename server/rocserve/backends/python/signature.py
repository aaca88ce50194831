"""Reads a model's own statement of its configuration: the result of its auto_complete_config, if it has one."""

from __future__ import annotations

import json
from typing import Any

from rocserve.backends.python.pb_utils.model_configuration import ModelConfig
from rocserve.backends.python.pb_utils.tensor import BY_CONFIG_NAME
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.requests import Signature, TensorSpec

_LARGEST_BATCH_SIZE, _LARGEST_SIZE = (1 << 31) - 1, (1 << 63) - 1


def read_signature(model_class: type[Any], config_json: str, model_name: str) -> Signature:
    """Return the signature after the class's auto_complete_config. Raises ServeError (INVALID_ARGUMENT) if that returns
    another type or values that a configuration cannot contain, and any exception that it raises."""
    completing = ModelConfig(config_json)
    if hasattr(model_class, "auto_complete_config"):
        completing = model_class.auto_complete_config(completing)
    if not isinstance(completing, ModelConfig):
        raise invalid_argument(
            f"auto_complete_config function in model '{model_name}' must return a valid pb.ModelConfig object."
        )
    try:
        # Through JSON, so that a value that JSON does not have (a numpy integer in dims) fails here, by its type.
        config: dict[str, Any] = json.loads(json.dumps(completing.as_dict()))
        return _signature(config, model_name)
    except ServeError:
        raise
    except Exception as error:
        # A model may write anything into the dictionary.
        raise invalid_argument(
            f"auto_complete_config of model '{model_name}' returns a configuration that cannot be read:"
            f" {type(error).__name__}: {error}"
        ) from None


def _signature(config: dict[str, Any], model_name: str) -> Signature:
    max_batch_size = _whole(config["max_batch_size"])
    if max_batch_size is None or max_batch_size < 0:
        raise invalid_argument(
            f"model '{model_name}' has max_batch_size {config['max_batch_size']}; expected a whole number, 0 or more"
        )
    if max_batch_size > _LARGEST_BATCH_SIZE:
        raise invalid_argument(
            f"model '{model_name}' has max_batch_size {max_batch_size}; expected {_LARGEST_BATCH_SIZE} at most"
        )
    batching = max_batch_size > 0
    return Signature(
        inputs=tuple(_spec(tensor, "input", batching, model_name) for tensor in config["input"]),
        outputs=tuple(_spec(tensor, "output", batching, model_name) for tensor in config["output"]),
        supports_batching=batching,
        optional_inputs=_inputs_with("optional", config, model_name),
        ragged_inputs=_inputs_with("allow_ragged_batch", config, model_name),
        max_batch_size=max_batch_size,
        dynamic_batching="dynamic_batching" in config,
        decoupled=_flag(config.get("model_transaction_policy", {}), "decoupled", f"model '{model_name}'"),
    )


def _inputs_with(flag: str, config: dict[str, Any], model_name: str) -> frozenset[str]:
    return frozenset(
        tensor["name"]
        for tensor in config["input"]
        if _flag(tensor, flag, f"input '{tensor['name']}' of model '{model_name}'")
    )


def _flag(table: dict[str, Any], key: str, whose: str) -> bool:
    """Return a boolean field. A text is refused, because Python takes "false" for true."""
    value = table.get(key, False)
    if not isinstance(value, bool):
        raise invalid_argument(f"{whose} has {key} {value!r}; expected True or False")
    return value


def _whole(value: Any) -> int | None:
    """Return a whole number, also from 3.0 or "3", as protobuf reads JSON; None if the value is not a whole number."""
    try:
        return int(str(value).removesuffix(".0"))
    except ValueError:
        return None


def _spec(tensor: dict[str, Any], what: str, batching: bool, model_name: str) -> TensorSpec:
    name, data_type = tensor["name"], tensor["data_type"]
    if not isinstance(name, str) or not name:
        raise invalid_argument(f"{what} of model '{model_name}' has the name {name!r}; expected a text")
    whose = f"{what} '{name}' of model '{model_name}'"
    datatype = BY_CONFIG_NAME.get(str(data_type))
    if datatype is None:
        raise invalid_argument(
            f"{whose} has data_type '{data_type}'; expected one of Triton's, such as TYPE_FP32, TYPE_INT64 or"
            " TYPE_STRING"
        )
    reshape = tensor.get("reshape")
    dims = tensor["dims"] if reshape is None else reshape.get("shape", ())
    sizes = [_whole(dim) for dim in dims] if isinstance(dims, list | tuple) else [None]
    if any(size is None or (not 0 < size <= _LARGEST_SIZE and size != -1) for size in sizes):
        raise invalid_argument(
            f"{whose} has dims {tensor['dims']}; expected a list of whole numbers, each 1 or more and below 2^63, or -1"
            " for any size"
        )
    shape = tuple(size for size in sizes if size is not None)
    return TensorSpec(name, datatype, (-1, *shape) if batching else shape)
