"""What a model's parameters say of its ONNX Runtime sessions.

| parameter | meaning | default |
|---|---|---|
| intra_op_thread_count | threads within one operator, shared by all instances; 0 = default | `default_thread_count` |
| inter_op_thread_count | operators side by side; above 1 switches to parallel execution; 0 = default | 1 |
| execution_mode | 0 sequential, 1 parallel | 0 |
| graph_optimization_level | disable, basic, extended, layout, all | by `optimization.graph.level`, else all |
| enable_mem_arena, enable_mem_pattern | 0 or 1 | 1 |
| session.* | a session configuration entry of ONNX Runtime, by its own name | |

The names are those of Triton's ONNX Runtime backend where it has one.
"""

from __future__ import annotations

from typing import Any

import onnxruntime

from rocserve.backends.parameters import MOST_THREADS, read_choice, read_integer, usable_cpus
from rocserve.core.errors import invalid_argument
from rocserve.core.model_config import ModelConfig

_FATAL_ONLY = 4
_SESSION_ENTRY_PREFIX = "session."
_DEFAULT_SESSION_ENTRIES = {
    # Threads wait actively during a run, where that makes runs about a tenth faster, and not between runs, where they
    # would take the CPU from the server.
    "session.force_spinning_stop": "1",
}
_LEVELS_OF_GRAPH = {-1: "basic", 1: "extended", 2: "disable"}
"""What Triton's ONNX Runtime backend makes of `optimization.graph.level`; all others are "all"."""
_OPTIMIZATION_LEVELS = {
    "disable": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "layout": "ORT_ENABLE_LAYOUT",
    "all": "ORT_ENABLE_ALL",
}


def session_options(config: ModelConfig, instance_count: int) -> Any:
    """The onnxruntime.SessionOptions.

    Raises:
        ServeError: INVALID_ARGUMENT; a parameter is wrong.
    """
    options = onnxruntime.SessionOptions()
    options.logid = config.name
    # What fails is raised with the same text; logged as well it would let any client fill the log.
    options.log_severity_level = _FATAL_ONLY
    options.intra_op_num_threads = read_integer(
        config, "intra_op_thread_count", 0, 0, MOST_THREADS
    ) or default_thread_count(instance_count)
    options.inter_op_num_threads = read_integer(config, "inter_op_thread_count", 0, 0, MOST_THREADS) or 1
    parallel = "1" if options.inter_op_num_threads > 1 else "0"
    if read_choice(config, "execution_mode", parallel, ("0", "1")) == "1":
        options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
    default_level = _LEVELS_OF_GRAPH.get(config.graph_level, "all")
    level = read_choice(config, "graph_optimization_level", default_level, tuple(_OPTIMIZATION_LEVELS))
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, _OPTIMIZATION_LEVELS[level])
    options.enable_cpu_mem_arena = read_choice(config, "enable_mem_arena", "1", ("0", "1")) == "1"
    options.enable_mem_pattern = read_choice(config, "enable_mem_pattern", "1", ("0", "1")) == "1"
    entries = {name: value for name, value in config.parameters.items() if name.startswith(_SESSION_ENTRY_PREFIX)}
    for name, value in {**_DEFAULT_SESSION_ENTRIES, **entries}.items():
        try:
            options.add_session_config_entry(name, value)
        except Exception as error:
            raise invalid_argument(f"parameter '{name}' of model '{config.name}': {error}") from None
    return options


def default_thread_count(instance_count: int) -> int:
    """Of one operator, its caller's thread included: the instances share the others, so that all that run at once have
    as many threads as there are CPUs."""
    return max(1, usable_cpus() - instance_count + 1)
