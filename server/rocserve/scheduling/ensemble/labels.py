"""The labels of an ensemble's output, found through its members."""

from __future__ import annotations

from rocserve.core.model_config import EnsembleStep, ModelConfig
from rocserve.core.serving import ServedVersion, ServingTable

_DEEPEST = 32
"""Ensembles within ensembles."""


def labels_of(config: ModelConfig, output: str, table: ServingTable, depth: int = 0) -> tuple[str, ...]:
    """A model's own labels of an output; of an ensemble without, those of the member that gives it."""
    own = next((entry.labels for entry in config.outputs if entry.name == output), ())
    if own or depth > _DEEPEST:
        return own
    for step in config.ensemble_steps:
        for member_output, tensor in step.output_map.items():
            if tensor == output:
                member = _member(step, table)
                return () if member is None else labels_of(member.config, member_output, table, depth + 1)
    return ()


def _member(step: EnsembleStep, table: ServingTable) -> ServedVersion | None:
    model = table.models.get(step.member)
    if model is None:
        return None
    return model.latest if step.model_version < 0 else model.versions.get(step.model_version)
