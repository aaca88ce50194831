"""Facts about the engine, for a model's metadata."""

from __future__ import annotations

from collections.abc import Mapping

from rocserve.backends.migraphx.serving.workbench import Workbench


def engine_properties(bench: Workbench, batch_sizes: str, note: str = "") -> Mapping[str, str]:
    """By name; what does not apply is left out.

    Args:
        batch_sizes: those in service; "" for a model without a batch dimension.
        note: why the program is another than the model's file says.
    """
    facts = {
        "migraphx_version": bench.binding.migraphx_version,
        "migraphx_binding": bench.binding.name,
        "migraphx_library": bench.binding.library,
        "rocm_version": bench.environment.rocm_version,
        "gpu_architecture": bench.environment.gpu_architecture,
        "target": bench.options.target.value,
        "precision": bench.options.precision.value,
        "batch_sizes": batch_sizes,
        "note": note,
    }
    return {name: value for name, value in facts.items() if value}
