"""Model folders made of a few words, and their definitions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rocserve.backends.registry import BackendRegistry
from rocserve.config.definition import FolderReading, ModelDefinition
from rocserve.core.errors import ServeError


class Models:
    """A new repository, whose folders are made of a few words."""

    def __init__(self, repository: Path, registry: BackendRegistry) -> None:
        self._repository = repository
        self.registry = registry

    def folder(self, name: str, files: Mapping[str, str] | None = None) -> Path:
        """`files`: such as {"config.pbtxt": text, "1/model.onnx": ""}."""
        folder = self._repository / name
        folder.mkdir(parents=True)
        for path, text in (files or {}).items():
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        return folder

    def read(self, folder: Path, **options: Any) -> ModelDefinition:
        """The only definition of a folder."""
        (definition,) = FolderReading(folder, self.registry, **options).definitions()
        return definition

    def fault(self, folder: Path, **options: Any) -> str:
        with pytest.raises(ServeError) as raised:
            FolderReading(folder, self.registry, **options).definitions()
        return raised.value.text

    def all(self, name: str, files: Mapping[str, str]) -> tuple[ModelDefinition, ...]:
        """All definitions of a new folder, as of a chain of AMD Inference Server."""
        return FolderReading(self.folder(name, files), self.registry).definitions()

    def made(self, name: str, files: Mapping[str, str], **options: Any) -> ModelDefinition:
        return self.read(self.folder(name, files), **options)

    def fault_of(self, name: str, files: Mapping[str, str], **options: Any) -> str:
        return self.fault(self.folder(name, files), **options)
