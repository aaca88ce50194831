"""What HTTP's front end has to know of a model before it reads a request's body."""

from __future__ import annotations

from typing import Protocol

from rocserve.core.model_config import ModelConfig
from rocserve.core.serving import ServingTableHolder


class Models(Protocol):
    """The configurations of the models that are served."""

    def find(self, name: str, version: str) -> ModelConfig | None:
        """Of the version that a request names; None = ask.

        Raises:
            ServeError: there is none ready.
        """

    async def ask(self, name: str, version: str) -> ModelConfig:
        """The same, of the server; raises as `find` does."""


class ServedModels:
    """Those of this process."""

    def __init__(self, tables: ServingTableHolder) -> None:
        self._tables = tables

    def find(self, name: str, version: str) -> ModelConfig:
        """See Models."""
        return self._tables.table.find(name, version).config

    async def ask(self, name: str, version: str) -> ModelConfig:
        """See Models."""
        return self.find(name, version)
