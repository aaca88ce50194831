"""Facts about the engine, for a model's metadata."""

from __future__ import annotations

from collections.abc import Mapping

from rocserve.backends.migraphx.serving.compile_context import CompileContext


def engine_properties(context: CompileContext, batch_sizes: str, note: str = "") -> Mapping[str, str]:
    """By name; what does not apply is left out.

    Args:
        batch_sizes: those in service; "" for a model without a batch dimension.
        note: why the program is another than the model's file says.
    """
    facts = {
        "migraphx_version": context.binding.migraphx_version,
        "migraphx_binding": context.binding.name,
        "migraphx_library": context.binding.library,
        "rocm_version": context.environment.rocm_version,
        "gpu_architecture": context.environment.gpu_architecture,
        "target": context.options.target.value,
        "precision": context.options.precision.value,
        "batch_sizes": batch_sizes,
        "note": note,
    }
    return {name: value for name, value in facts.items() if value}
