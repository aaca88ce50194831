"""Reads the parameters for how PyTorch runs a model: Triton's under Triton's names, and rocserve's own."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rocserve.backends.parameters import MOST_THREADS, read_choice, read_integer, read_switch, usable_cpus
from rocserve.core.errors import invalid_argument
from rocserve.core.model_config import InstanceKind, ModelConfig

TORCH_COMPILE = "TORCH_COMPILE_OPTIONAL_PARAMETERS"


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How PyTorch runs a model."""

    precision: str
    """fp32 (the file's own precision), fp16 or bf16."""
    intra_op_threads: int
    inter_op_threads: int
    inference_mode: bool
    optimised_execution: bool
    cudnn: bool
    batches_at_once: int
    """0 = not set."""
    cleans_cache: bool
    script_switches: Mapping[str, bool]
    """Parameter -> value, for the switches of TorchScript's executor that the configuration sets."""


def run_options(config: ModelConfig) -> RunOptions:
    """Read the parameters. Raises ServeError (INVALID_ARGUMENT) if a parameter is wrong or cannot be honoured."""
    if read_switch(config, "ENABLE_NVFUSER", False):
        raise invalid_argument(
            f"model '{config.name}': parameter 'ENABLE_NVFUSER' is not supported: PyTorch has no nvFuser since 2.2;"
            " remove it"
        )
    if read_switch(config, "ENABLE_WEIGHT_SHARING", False):
        logging.getLogger(__name__).warning(
            "model '%s': parameter 'ENABLE_WEIGHT_SHARING' has no effect: each instance is a process with its own copy"
            " of the weights",
            config.name,
        )
    return RunOptions(
        precision=read_choice(config, "precision", "fp32", ("fp32", "fp16", "bf16")),
        intra_op_threads=_threads(config, "INTRA_OP_THREAD_COUNT", "NUM_THREADS") or _threads_an_instance(config),
        inter_op_threads=_threads(config, "INTER_OP_THREAD_COUNT", "NUM_INTEROP_THREADS") or 1,
        inference_mode=read_switch(config, "INFERENCE_MODE", True),
        optimised_execution=not read_switch(config, "DISABLE_OPTIMIZED_EXECUTION", False),
        cudnn=not read_switch(config, "DISABLE_CUDNN", False),
        # Each concurrent batch has pinned memory for the largest batch.
        batches_at_once=read_integer(config, "batches_at_once", 0, 1, 8),
        cleans_cache=read_switch(config, "ENABLE_CACHE_CLEANING", False),
        script_switches={
            name: read_switch(config, name, True)
            for name in ("ENABLE_JIT_EXECUTOR", "ENABLE_JIT_PROFILING", "ENABLE_TENSOR_FUSER")
            if config.parameters.get(name)
        },
    )


@dataclass(frozen=True, slots=True)
class TorchCompileOptions:
    """The parameters of the configuration for torch.compile."""

    is_requested: bool = False
    """Whether the parameter is present and does not disable the compiler."""
    mode: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


def torch_compile_options(config: ModelConfig) -> TorchCompileOptions:
    """Read the parameter. Raises ServeError (INVALID_ARGUMENT) if it is wrong, or the compiler is not Inductor."""
    text = config.parameters.get(TORCH_COMPILE, "").strip()
    if not text:
        return TorchCompileOptions()
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    # fullgraph and dynamic have no effect: an exported program is one graph, and says which of its sizes vary.
    options = {
        "fullgraph": bool, "dynamic": bool, "backend": str, "mode": str, "options": dict, "disable": bool,
    }  # fmt: skip
    if not isinstance(given, dict) or any(
        key not in options or not isinstance(value, options[key]) for key, value in given.items()
    ):
        known = ", ".join(f"{key} ({kind.__name__})" for key, kind in options.items())
        raise invalid_argument(
            f"parameter '{TORCH_COMPILE}' of model '{config.name}' must be a JSON object with any of {known},"
            f" not '{text}'"
        )
    if given.get("backend", "inductor") != "inductor":
        raise invalid_argument(
            f"parameter '{TORCH_COMPILE}' of model '{config.name}' names backend '{given['backend']}'; only inductor is"
            " supported"
        )
    return TorchCompileOptions(not given.get("disable", False), given.get("mode", ""), given.get("options", {}))


def _threads(config: ModelConfig, *names: str) -> int:
    """Return the first of these parameters that is above 0; 0 = there is none."""
    return next((count for name in names if (count := read_integer(config, name, 0, 0, MOST_THREADS))), 0)


def _threads_an_instance(config: ModelConfig) -> int:
    """Return the threads of one instance. All instances on the CPU together have as many threads as there are CPUs."""
    groups = [group for group in config.instance_groups if not group.passive and group.kind is not InstanceKind.GPU]
    return max(1, usable_cpus() // max(1, sum(group.count for group in groups)))
