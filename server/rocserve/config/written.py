"""A model's configuration as its author wrote it, neither completed nor checked."""

from __future__ import annotations

from dataclasses import dataclass

from rocserve.protocol.model_config_pb2 import ModelConfig


@dataclass(frozen=True, slots=True)
class WrittenConfig:
    models: tuple[ModelConfig, ...]
    source: str
    """The file's name in the model folder, or the text that errors show instead."""
    warnings: tuple[str, ...] = ()
    is_amd: bool = False
    """In AMD Inference Server's dialect: the loaded model's tensors override the configuration's."""
    model_filenames: tuple[str, ...] = ()
    """The dialect's names or patterns of a model's file, if the model names none; empty = the backend's."""
