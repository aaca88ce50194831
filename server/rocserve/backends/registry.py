"""Finds the backends and answers which one serves a platform."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable

import rocserve.backends
from rocserve.backends.base import BackendSpec

ENSEMBLE_PLATFORM = "ensemble"


class BackendRegistry:
    """The backends by the platform and backend names of config.pbtxt."""

    def __init__(self, backends: Iterable[BackendSpec]) -> None:
        self._backends = tuple(backends)
        self._by_platform = {platform: spec for spec in self._backends for platform in (*spec.platforms, spec.name)}

    @property
    def backends(self) -> tuple[BackendSpec, ...]:
        return self._backends

    @property
    def preload(self) -> tuple[str, ...]:
        """What the zygote imports ahead, for all engines that fork from it."""
        engines = (engine for spec in self._backends for engine in spec.engines if engine.forks_from_zygote)
        return tuple(dict.fromkeys(name for engine in engines for name in engine.preload))

    @property
    def platforms(self) -> tuple[str, ...]:
        return tuple(sorted(self._by_platform))

    def find(self, platform: str, backend: str) -> BackendSpec | None:
        """The backend that `platform` or, when that is empty, `backend` names."""
        return self._by_platform.get(platform or backend)


def discover_backends() -> BackendRegistry:
    """The registry of all sub-packages of rocserve.backends; imports no engine."""
    specs = []
    for module in pkgutil.iter_modules(rocserve.backends.__path__):
        if module.ispkg:
            package = importlib.import_module(f"rocserve.backends.{module.name}")
            specs.append(package.BACKEND)
    return BackendRegistry(specs)
