"""What a model's parameters say of how PyTorch runs it: Triton's, by its names, and rocserve's own.

| parameter | meaning | default |
|---|---|---|
| precision | fp32: as the file has it; fp16, bf16: weights and computation; tensors stay as they are | fp32 |
| INTRA_OP_THREAD_COUNT, NUM_THREADS | threads within one operator, of each instance | the CPUs by the instances |
| INTER_OP_THREAD_COUNT, NUM_INTEROP_THREADS | operators of TorchScript side by side | 1 |
| INFERENCE_MODE | torch.inference_mode, else torch.no_grad | true |
| DISABLE_OPTIMIZED_EXECUTION, ENABLE_JIT_EXECUTOR, ENABLE_JIT_PROFILING, ENABLE_TENSOR_FUSER | TorchScript's own | |
| DISABLE_CUDNN | the GPU's library of network operators is left out | false |
| batches_at_once | that an instance may have under way | 2 where they run at fixed sizes on a GPU, else 1 |
| ENABLE_CACHE_CLEANING | GPU memory that is free goes back after each batch | false |
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from rocserve.backends.parameters import MOST_THREADS, read_choice, read_integer, usable_cpus
from rocserve.core.errors import invalid_argument
from rocserve.core.model_config import InstanceKind, ModelConfig

_LOG = logging.getLogger(__name__)

_MOST_AT_ONCE = 8
"""Each has pinned memory for the largest batch."""
_SWITCHES = ("true", "false", "1", "0", "True", "False")
_REFUSED = {
    "ENABLE_NVFUSER": "PyTorch has had no nvFuser since 2.2; leave it out",
}
"""Where they are switched on: cannot be followed, and why."""
_WITHOUT_EFFECT = {
    "ENABLE_WEIGHT_SHARING": "each instance is a process with weights of its own; of one instance there is one copy",
}
"""Where they are switched on: results are the same without, and why it is not followed."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    precision: str
    """fp32 (as the file has it), fp16 or bf16."""
    intra_op_threads: int
    inter_op_threads: int
    inference_mode: bool
    optimised_execution: bool
    cudnn: bool
    batches_at_once: int
    """0 = not said."""
    cleans_cache: bool
    script_switches: Mapping[str, bool]
    """Of TorchScript's executor, those that are given, by their parameters."""


def run_options(config: ModelConfig) -> RunOptions:
    """
    Raises:
        ServeError: INVALID_ARGUMENT, a parameter is wrong or cannot be followed.
    """
    for name, why in _REFUSED.items():
        if _switch(config, name, False):
            raise invalid_argument(f"model '{config.name}': parameter '{name}' cannot be followed: {why}")
    for name, why in _WITHOUT_EFFECT.items():
        if _switch(config, name, False):
            _LOG.warning("model '%s': parameter '%s' changes nothing: %s", config.name, name, why)
    switches = ("ENABLE_JIT_EXECUTOR", "ENABLE_JIT_PROFILING", "ENABLE_TENSOR_FUSER")
    return RunOptions(
        precision=read_choice(config, "precision", "fp32", ("fp32", "fp16", "bf16")),
        intra_op_threads=_threads(config, "INTRA_OP_THREAD_COUNT", "NUM_THREADS") or _threads_an_instance(config),
        inter_op_threads=_threads(config, "INTER_OP_THREAD_COUNT", "NUM_INTEROP_THREADS") or 1,
        inference_mode=_switch(config, "INFERENCE_MODE", True),
        optimised_execution=not _switch(config, "DISABLE_OPTIMIZED_EXECUTION", False),
        cudnn=not _switch(config, "DISABLE_CUDNN", False),
        batches_at_once=read_integer(config, "batches_at_once", 0, 1, _MOST_AT_ONCE),
        cleans_cache=_switch(config, "ENABLE_CACHE_CLEANING", False),
        script_switches={name: _switch(config, name, True) for name in switches if config.parameters.get(name)},
    )


def _switch(config: ModelConfig, name: str, default: bool) -> bool:
    return read_choice(config, name, str(default).lower(), _SWITCHES).lower() in ("true", "1")


def _threads(config: ModelConfig, *names: str) -> int:
    """By the first that is given; 0 = none is."""
    return next((count for name in names if (count := read_integer(config, name, 0, 0, MOST_THREADS))), 0)


def _threads_an_instance(config: ModelConfig) -> int:
    """All instances on the CPU together have as many threads as there are CPUs."""
    groups = [group for group in config.instance_groups if not group.passive and group.kind is not InstanceKind.GPU]
    return max(1, usable_cpus() // max(1, sum(group.count for group in groups)))
