"""Versions of models in AMD Inference Server's dialect, which also take its clients' single items."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rocserve.config.definition import ModelDefinition
from rocserve.config.sources import Dialect
from rocserve.core.model_config import ModelConfig
from rocserve.core.requests import InferRequest
from rocserve.core.serving import Responder
from rocserve.core.single_items import SingleItems
from rocserve.core.statistics import ModelStatistics
from rocserve.repository.loader import LoadedVersion, VersionLoader


class ItemVersionLoader:
    """A loader whose versions of models in that dialect take single items; those of others are left as they are."""

    def __init__(self, loader: VersionLoader) -> None:
        self._loader = loader

    async def load(
        self,
        definition: ModelDefinition,
        version: int,
        version_folder: Path,
        content: str,
        on_change: Callable[[], None],
        on_progress: Callable[[str], None],
    ) -> LoadedVersion:
        """See repository.loader.VersionLoader."""
        loaded = await self._loader.load(definition, version, version_folder, content, on_change, on_progress)
        return ItemVersion(loaded) if definition.dialect is Dialect.AMD else loaded


class ItemVersion:
    """Implements repository.loader.LoadedVersion before another one, which sees batches only."""

    def __init__(self, version: LoadedVersion) -> None:
        self._version = version
        self._items = SingleItems(version.config)
        self.name = version.name
        self.version = version.version

    def infer(self, request: InferRequest, responder: Responder) -> None:
        """See core.serving.ServedVersion."""
        self._version.infer(*self._items.take(request, responder))

    @property
    def config(self) -> ModelConfig:
        return self._version.config

    @property
    def config_message(self) -> bytes:
        return self._version.config_message

    @property
    def statistics(self) -> ModelStatistics:
        return self._version.statistics

    @property
    def properties(self) -> Mapping[str, str]:
        return self._version.properties

    @property
    def pending_requests(self) -> int:
        return self._version.pending_requests

    @property
    def load_seconds(self) -> float:
        return self._version.load_seconds

    @property
    def worker_pids(self) -> Sequence[int]:
        return self._version.worker_pids

    @property
    def worker_restarts(self) -> int:
        return self._version.worker_restarts

    @property
    def available(self) -> bool:
        return self._version.available

    @property
    def status_reason(self) -> str:
        return self._version.status_reason

    def follow_members(self, is_decoupled: bool) -> None:
        """See repository.loader.LoadedVersion."""
        self._version.follow_members(is_decoupled)

    async def unload(self) -> None:
        """See repository.loader.LoadedVersion."""
        await self._version.unload()
