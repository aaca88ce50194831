"""Tells when a changed configuration takes away what clients of a version use: one that was cut short does."""

from __future__ import annotations

from collections.abc import Sequence

from rocserve.core.model_config import InputConfig, ModelConfig, OutputConfig


def lost_interface(served: ModelConfig, new: ModelConfig, has_lost_batch_size: bool) -> str:
    """What `new` no longer has and puts nothing in the place of; "" = nothing.

    Args:
        new: the configuration as it was completed from the model, which may have supplied what is not written.
        has_lost_batch_size: max_batch_size was written for what is served, and is not any more. What was completed may
            become less by itself, as memory does.
    """
    parts = [
        *_lost_tensors("input", served.inputs, new.inputs),
        *_lost_tensors("output", served.outputs, new.outputs),
    ]
    has_same_dims = not _dims(served).isdisjoint(_dims(new))
    if has_lost_batch_size and new.max_batch_size < served.max_batch_size and has_same_dims:
        parts.append("max_batch_size")
    if served.sequence_batching is not None and new.sequence_batching is None:
        parts.append("sequence_batching")
    if served.decoupled and not new.decoupled:
        parts.append("model_transaction_policy.decoupled")
    labels = {output.name: len(output.labels) for output in new.outputs}
    parts += [
        f"{len(output.labels) - labels[output.name]} of the {len(output.labels)} labels of output '{output.name}'"
        for output in served.outputs
        if labels.get(output.name, len(output.labels)) < len(output.labels)
    ]
    return ", ".join(parts)


def _dims(config: ModelConfig) -> set[tuple[str, tuple[int, ...]]]:
    return {(tensor.name, tensor.dims) for tensor in config.inputs} | {
        (tensor.name, tensor.dims) for tensor in config.outputs
    }


def _lost_tensors(
    what: str, served: Sequence[InputConfig | OutputConfig], new: Sequence[InputConfig | OutputConfig]
) -> list[str]:
    """None where there is one that was not there before: then it is another interface, and meant."""
    before, after = {tensor.name for tensor in served}, {tensor.name for tensor in new}
    return [] if after - before else [f"{what} '{name}'" for name in sorted(before - after)]
