"""Checks that a new configuration keeps what clients of the served version use: its file may be truncated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rocserve.config.sources import REQUEST_SOURCE
from rocserve.core.errors import invalid_argument
from rocserve.core.model_config import InputConfig, ModelConfig, OutputConfig
from rocserve.repository.content import ModelContent


def check_interface(
    version: int, served: ModelConfig, before: ModelContent, new: ModelConfig, content: ModelContent
) -> None:
    """Refuse a new version if only the configuration changed and lost something that clients use. A deliberate change
    of the interface comes with new model files. Ensembles have no other files, so they are not checked. `before`: the
    content of the `served` configuration. Raises ServeError (INVALID_ARGUMENT)."""
    # A load request's configuration is never truncated.
    is_whole = REQUEST_SOURCE in (before.definition.source, content.definition.source)
    if content.definition.is_ensemble or is_whole or before.scan.versions[version] != content.scan.versions[version]:
        return
    was_written, is_written = (one.definition.message.max_batch_size > 0 for one in (before, content))
    if before.definition.class_names is not None:
        # These labels came from labels.txt, which is checked against the model.
        served = replace(served, outputs=tuple(replace(output, labels=()) for output in served.outputs))
    if lost := lost_interface(served, new, was_written and not is_written):
        raise invalid_argument(
            f"the configuration has lost {lost}, but the version's files have not changed: the configuration may be"
            " truncated. Restore it; or, if the change is intended, change the version's files too or unload the model"
            " first"
        )


def lost_interface(served: ModelConfig, new: ModelConfig, has_lost_batch_size: bool) -> str:
    """Return what the new configuration lacks and does not replace; "" = nothing. `new` has been completed from the
    model. `has_lost_batch_size`: max_batch_size was written for the served version and is not written now; the written
    value counts because a completed value may fall by itself, for example with less free memory."""
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
    tensors: tuple[InputConfig | OutputConfig, ...] = (*config.inputs, *config.outputs)
    return {(tensor.name, tensor.dims) for tensor in tensors}


def _lost_tensors(
    what: str, served: Sequence[InputConfig | OutputConfig], new: Sequence[InputConfig | OutputConfig]
) -> list[str]:
    """Return the lost tensors; none if there is a new tensor, because the change is then deliberate."""
    before, after = {tensor.name for tensor in served}, {tensor.name for tensor in new}
    return [] if after - before else [f"{what} '{name}'" for name in sorted(before - after)]
