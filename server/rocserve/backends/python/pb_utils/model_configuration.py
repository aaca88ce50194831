"""Lets models complete and read their configuration. The dictionaries are Triton's JSON."""

from __future__ import annotations

import json
from typing import Any


class ModelConfig:
    def __init__(self, model_config: str) -> None:
        self._model_config: dict[str, Any] = json.loads(model_config)
        self._model_config.setdefault("max_batch_size", 0)
        self._model_config.setdefault("input", [])
        self._model_config.setdefault("output", [])

    def as_dict(self) -> dict[str, Any]:
        """Return the configuration, which the caller must not change."""
        return self._model_config

    @property
    def _name(self) -> str:
        return str(self._model_config.get("name", ""))

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Raises ValueError if the configuration has a larger max_batch_size."""
        configured = self._model_config["max_batch_size"]
        if configured > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {configured}, but in auto-complete-config function for model"
                f" '{self._name}' specified max_batch_size {max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Ask for a dynamic batcher, unless there is one. Raises ValueError if there is another scheduler."""
        for scheduler in ("sequence_batching", "ensemble_scheduling"):
            if scheduler in self._model_config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{scheduler}', but auto-complete-config function"
                    f" for model '{self._name}' tries to set scheduling_choice as 'dynamic_batching'"
                )
        self._model_config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, transaction_policy_dict: dict[str, Any]) -> None:
        """Raises ValueError if a property is not "decoupled", or contradicts the configuration."""
        if any(name != "decoupled" for name in transaction_policy_dict):
            raise ValueError(
                f"model transaction property in auto-complete-config function for model '{self._name}' contains"
                " property other than 'decoupled'."
            )
        policy = self._model_config.setdefault("model_transaction_policy", {})
        if "decoupled" in transaction_policy_dict:
            decoupled = transaction_policy_dict["decoupled"]
            if policy.get("decoupled", decoupled) != decoupled:
                raise ValueError(
                    f"trying to change decoupled property in auto-complete-config for model '{self._name}', which is"
                    f" already set to '{policy['decoupled']}'."
                )
            policy["decoupled"] = decoupled

    def add_input(self, input: dict[str, Any]) -> None:  # noqa: A002
        """Add an input with `name`, `data_type`, `dims` and perhaps `optional` and `allow_ragged_batch`, or complete
        the input of that name. Raises ValueError if the input has another property, lacks one, or contradicts the
        configuration."""
        self._add("input", input, ("name", "data_type", "dims", "optional", "allow_ragged_batch"))

    def add_output(self, output: dict[str, Any]) -> None:
        """Add an output, as `add_input`, but with `name`, `data_type` and `dims` only."""
        self._add("output", output, ("name", "data_type", "dims"))

    def _add(self, what: str, tensor: dict[str, Any], allowed: tuple[str, ...]) -> None:
        where = f"in auto-complete-config function for model '{self._name}'"
        if "name" not in tensor:
            raise ValueError(f"{what} {where} is missing 'name' property.")
        if any(name not in allowed for name in tensor):
            listed = "', '".join(allowed[:-1]) + f"' and '{allowed[-1]}"
            raise ValueError(f"{what} '{tensor['name']}' {where} contains property other than '{listed}'.")
        for name in ("data_type", "dims"):
            if name not in tensor:
                raise ValueError(f"{what} '{tensor['name']}' {where} is missing '{name}' property.")
        for current in self._model_config[what]:
            if current["name"] == tensor["name"]:
                break
        else:
            self._model_config[what].append(tensor)
            return
        configured = current.get("data_type", "TYPE_INVALID")
        if configured not in ("TYPE_INVALID", tensor["data_type"]):
            raise ValueError(
                f"unable to load model '{self._name}', configuration expects datatype {configured} for {what}"
                f" '{tensor['name']}', model provides {tensor['data_type']}"
            )
        prefix = f"model '{self._name}', tensor '{tensor['name']}': the model expects"
        dims = current.get("dims")
        if dims and list(dims) != list(tensor["dims"]):
            raise ValueError(f"{prefix} dims {tensor['dims']} but the model configuration specifies dims {dims}")
        optional = current.get("optional", tensor.get("optional"))
        if "optional" in tensor and optional != tensor["optional"]:
            raise ValueError(
                f"{prefix} optional {tensor['optional']} but the model configuration specifies optional {optional}"
            )
        # False in a configuration is also the value of an input that does not say it.
        if current.get("allow_ragged_batch") and tensor.get("allow_ragged_batch") is False:
            raise ValueError(
                f"{prefix} allow_ragged_batch False but the model configuration specifies allow_ragged_batch True"
            )
        current.update(tensor)


def get_input_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return the input of that name in a configuration; None if there is none."""
    return next((tensor for tensor in model_config.get("input", ()) if tensor["name"] == name), None)


def get_output_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return the output of that name in a configuration; None if there is none."""
    return next((tensor for tensor in model_config.get("output", ()) if tensor["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: dict[str, Any]) -> bool:
    """Return whether the configuration lets a request have any number of responses."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))
