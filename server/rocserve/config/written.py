"""A model's configuration as its author wrote it; nothing is completed or checked yet."""

from __future__ import annotations

from dataclasses import dataclass

from rocserve.protocol.model_config_pb2 import ModelConfig


@dataclass(frozen=True, slots=True)
class WrittenConfig:
    models: tuple[ModelConfig, ...]
    source: str
    """The file's name in the model folder, or what stands in its place."""
    warnings: tuple[str, ...] = ()
    is_amd: bool = False
    """In AMD Inference Server's dialect: its tensors give way to the loaded model's where they differ."""
    model_filenames: tuple[str, ...] = ()
    """Names or patterns of a model's file that the dialect has where the model says none; empty: the backend's."""
