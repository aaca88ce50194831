"""Reads the parameters in a model's configuration that backends understand."""

from __future__ import annotations

import math
import os

from rocserve.backends.host import Host
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.load_check import LoadCheckMode
from rocserve.core.model_config import ModelConfig
from rocserve.settings import EngineSettings

MOST_THREADS = 1024
"""Bound for one model: more than the CPUs of any machine."""


def read_integer(config: ModelConfig, name: str, default: int, least: int, most: int) -> int:
    """Raises ServeError (INVALID_ARGUMENT) if the parameter is not a whole number from `least` to `most`."""
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


def read_compile_timeout(config: ModelConfig) -> float:
    """Return the seconds that a compiler may take for one program; 0 = no limit. Raises ServeError (INVALID_ARGUMENT)
    for anything else."""
    name, most = "compile_timeout_secs", 30 * 24 * 3600
    try:
        seconds = float(config.parameters.get(name) or 3600.0)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= most:
        raise unfit(config, name, f"seconds from 0 (no limit) to {most}")
    return seconds


def asked_engine(config: ModelConfig) -> str:
    """Return the parameter `engine`; "" = not set."""
    return config.parameters.get("engine", "").strip()


def read_choice(config: ModelConfig, name: str, default: str, choices: tuple[str, ...]) -> str:
    """Raises ServeError (INVALID_ARGUMENT) if the parameter is not one of `choices`."""
    text = config.parameters.get(name, "").strip() or default
    if text not in choices:
        raise unfit(config, name, "one of " + ", ".join(filter(None, choices)))
    return text


def read_switch(config: ModelConfig, name: str, default: bool) -> bool:
    """Raises ServeError (INVALID_ARGUMENT) if the parameter is not a boolean."""
    text = config.parameters.get(name, "").strip().lower()
    if text not in ("", "true", "1", "false", "0"):
        raise unfit(config, name, "true, false, 1 or 0")
    return text in ("true", "1") if text else default


LOAD_CHECK = "load_check"
"""Parameter: the mode of a model's load check, instead of --load-check."""


def load_check_mode(config: ModelConfig, settings: EngineSettings) -> LoadCheckMode:
    """Raises ServeError (INVALID_ARGUMENT) if the parameter `load_check` is not a mode."""
    return LoadCheckMode(
        read_choice(config, LOAD_CHECK, settings.load_check, tuple(mode.value for mode in LoadCheckMode))
    )


def unfit(config: ModelConfig, name: str, expected: str) -> ServeError:
    text = config.parameters[name].strip()
    return invalid_argument(f"parameter '{name}' of model '{config.name}' must be {expected}, not \"{text}\"")


def usable_cpus(host: Host | None = None) -> int:
    """Return how many CPUs this process may use: by its affinity or, if that is less, by the quota of its container or
    service. A part of a CPU counts as a whole one."""
    cpus = len(os.sched_getaffinity(0))
    quota = (host or Host()).cpu_quota()
    return cpus if quota is None else max(1, min(cpus, math.ceil(quota)))
