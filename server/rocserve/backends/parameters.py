"""Reads the parameters of a model's configuration that backends understand."""

from __future__ import annotations

import math
import os
from pathlib import Path

from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.model_config import ModelConfig

_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Quota and period in microseconds (Linux control groups, version 2)."""


MOST_THREADS = 1024
"""Of one model: more than any machine has CPUs to run them."""


def read_integer(config: ModelConfig, name: str, default: int, least: int, most: int) -> int:
    """Raises: ServeError: INVALID_ARGUMENT when the parameter is no whole number from `least` to `most`."""
    text = config.parameters.get(name, "").strip()
    if not text:
        return default
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise unfit(config, name, f"a whole number from {least} to {most}")
    return value


def asked_engine(config: ModelConfig) -> str:
    """The parameter `engine` as it is compared; "" = there is none."""
    return config.parameters.get("engine", "").strip()


def read_choice(config: ModelConfig, name: str, default: str, choices: tuple[str, ...]) -> str:
    """Raises: ServeError: INVALID_ARGUMENT when the parameter is none of `choices`."""
    text = config.parameters.get(name, "").strip() or default
    if text not in choices:
        raise unfit(config, name, "one of " + ", ".join(filter(None, choices)))
    return text


def read_switch(config: ModelConfig, name: str, default: bool) -> bool:
    """Raises: ServeError: INVALID_ARGUMENT when the parameter is no switch."""
    text = config.parameters.get(name, "").strip().lower()
    if text not in ("", "true", "1", "false", "0"):
        raise unfit(config, name, "true, false, 1 or 0")
    return text in ("true", "1") if text else default


def unfit(config: ModelConfig, name: str, expected: str) -> ServeError:
    """For a parameter that is not as it must be."""
    text = config.parameters[name].strip()
    return invalid_argument(f"parameter '{name}' of model '{config.name}' must be {expected}, not \"{text}\"")


def usable_cpus() -> int:
    """How many CPUs this process may use: its affinity, or its container's quota where that is less."""
    cpus = len(os.sched_getaffinity(0))
    try:
        quota, period = _CGROUP_QUOTA.read_text().split()
        return max(1, min(cpus, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):
        # No such file, or "max": no quota.
        return cpus
