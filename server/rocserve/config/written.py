"""A model's configuration in its written form, neither completed nor checked."""

from __future__ import annotations

from dataclasses import dataclass

from rocserve.protocol.model_config_pb2 import ModelConfig


@dataclass(frozen=True, slots=True)
class WrittenConfig:
    """The configurations in a model's folder, as a user wrote them."""

    models: tuple[ModelConfig, ...]
    source: str
    """The file's name in the model folder, or the text that errors show instead."""
    warnings: tuple[str, ...] = ()
    is_amd: bool = False
    """The dialect is AMD Inference Server's: the loaded model's tensors override the configuration's."""
    model_filenames: tuple[str, ...] = ()
    """Names or patterns of the model's file in this dialect, if the configuration names none; empty = the backend's."""
