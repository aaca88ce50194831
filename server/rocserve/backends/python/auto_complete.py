"""What a model says of its own configuration, by its auto_complete_config."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rocserve.backends.python.pb_utils.datatypes import datatype_of_config
from rocserve.backends.python.pb_utils.model_configuration import ModelConfig
from rocserve.core.errors import invalid_argument
from rocserve.core.requests import Signature, TensorSpec


def completed_config(model_class: type[Any], config_json: str, model_name: str) -> dict[str, Any]:
    """The configuration after the class's auto_complete_config, where it has one.

    Raises:
        ServeError: INVALID_ARGUMENT; it returns something else.
        Whatever it raises.
    """
    config = ModelConfig(config_json)
    if hasattr(model_class, "auto_complete_config"):
        config = model_class.auto_complete_config(config)
    if not isinstance(config, ModelConfig):
        raise invalid_argument(
            f"auto_complete_config function in model '{model_name}' must return a valid pb.ModelConfig object."
        )
    # Through JSON, as everything goes that is no plain number (a numpy integer in dims) fails here, with its name.
    completed: dict[str, Any] = json.loads(json.dumps(config.as_dict()))
    return completed


def signature_of(config: Mapping[str, Any]) -> Signature:
    """The configuration as what the model reports of itself: all of it is the model's word.

    Raises:
        ServeError: INVALID_ARGUMENT; a tensor's datatype or dims are not what a configuration may have.
    """
    max_batch_size = int(config["max_batch_size"])
    batching = max_batch_size > 0
    return Signature(
        inputs=_specs(config, "input", batching),
        outputs=_specs(config, "output", batching),
        supports_batching=batching,
        optional_inputs=frozenset(tensor["name"] for tensor in config["input"] if tensor.get("optional", False)),
        max_batch_size=max_batch_size,
        dynamic_batching="dynamic_batching" in config,
        decoupled=bool(config.get("model_transaction_policy", {}).get("decoupled", False)),
    )


def _specs(config: Mapping[str, Any], what: str, batching: bool) -> tuple[TensorSpec, ...]:
    return tuple(_spec(tensor, what, batching, str(config.get("name", ""))) for tensor in config[what])


def _spec(tensor: Mapping[str, Any], what: str, batching: bool, model_name: str) -> TensorSpec:
    name, data_type = tensor["name"], tensor["data_type"]
    datatype = datatype_of_config(data_type)
    if datatype is None:
        raise invalid_argument(
            f"{what} '{name}' of model '{model_name}' has data_type '{data_type}'; expected one of Triton's, such as"
            " TYPE_FP32, TYPE_INT64 or TYPE_STRING"
        )
    dims = _dims(tensor, what, model_name)
    return TensorSpec(name, datatype, (-1, *dims) if batching else dims)


def _dims(tensor: Mapping[str, Any], what: str, model_name: str) -> tuple[int, ...]:
    reshape = tensor.get("reshape")
    dims = tensor["dims"] if reshape is None else reshape.get("shape", ())
    if not isinstance(dims, Sequence) or isinstance(dims, str):
        dims = ("?",)
    try:
        sizes = tuple(int(dim) for dim in dims)
    except (TypeError, ValueError):
        sizes = (0,)
    if any(size < 1 and size != -1 for size in sizes):
        raise invalid_argument(
            f"{what} '{tensor['name']}' of model '{model_name}' has dims {tensor['dims']}; expected a list of whole"
            " numbers, each 1 or more, or -1 for any size"
        )
    return sizes
