"""Chooses the maker of a preset's models."""

from __future__ import annotations

from pathlib import Path

from rocserve.config.definition import ModelDefinition
from rocserve.config.preprocess.generated import GeneratedModel
from rocserve.config.preprocess.images import image_models
from rocserve.config.preprocess.text_files import read_text_files
from rocserve.config.preprocess.texts import text_models
from rocserve.core.model_config import ModelConfig
from rocserve.presets import PREPROCESS, TEXT


def preset_models(config: ModelConfig, definition: ModelDefinition, version_folder: Path) -> tuple[GeneratedModel, ...]:
    """Generate the models of a complete configuration that has the parameter `preprocess`. Blocks on the disk. Raises
    ServeError (INVALID_ARGUMENT) if the preset is unknown, or if it or the model's files do not fit the model."""
    if config.parameters[PREPROCESS] == TEXT:
        files = read_text_files(config.name, definition.files, version_folder)
        return text_models(config, files, definition.class_names)
    return image_models(config, definition.class_names)
