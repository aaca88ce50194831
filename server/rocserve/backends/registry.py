"""Finds the backends, and the backend that serves a platform."""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

import rocserve.backends
from rocserve.backends.base import BackendSpec
from rocserve.settings import DEFAULT_MAX_BATCH_SIZE

ENSEMBLE_PLATFORM = "ensemble"


class BackendRegistry:
    """Looks up backends by the platform and backend names in config.pbtxt."""

    def __init__(self, backends: Iterable[BackendSpec]) -> None:
        self.backends = tuple(backends)
        self._by_platform = {platform: spec for spec in self.backends for platform in (*spec.platforms, spec.name)}
        self.platforms = tuple(sorted(self._by_platform))

    def expected_modules(self, folders: Iterable[Path]) -> tuple[str, ...]:
        """Return what the zygote will import for the models below the folders, by the names of their files. It is a
        guess from the first folders: what it misses is imported at the first launch."""
        found: dict[str, None] = {}
        # A hundred folders take a millisecond or two.
        for names in islice(chain.from_iterable(map(_names_of_files, folders)), 100):
            for spec in self.backends:
                if any(name in spec.model_filenames or name.lower().endswith(spec.file_endings) for name in names):
                    found |= dict.fromkeys(name for engine in spec.engines for name in engine.zygote_modules)
        return tuple(found)

    def find(self, platform: str, backend: str) -> BackendSpec | None:
        """Return the backend that `platform` names or, if that is empty, `backend`."""
        return self._by_platform.get(platform or backend)


def _names_of_files(repository: Path) -> Iterator[Sequence[str]]:
    """Return the names of the files in the repository, in its models and in their versions, folder by folder."""
    for folder, folders, names in os.walk(repository, followlinks=True):
        if len(Path(folder).relative_to(repository).parts) == 2:
            folders.clear()
        yield names


def discover_backends() -> BackendRegistry:
    """Return the registry of all sub-packages of rocserve.backends. Imports no engine."""
    specs = []
    for module in pkgutil.iter_modules(rocserve.backends.__path__):
        if module.ispkg:
            package = importlib.import_module(f"rocserve.backends.{module.name}")
            specs.append(package.BACKEND)
    return BackendRegistry(specs)


def with_backend_config(
    registry: BackendRegistry, values: Iterable[tuple[str, str, str]]
) -> tuple[BackendRegistry, tuple[str, ...]]:
    """Apply settings, and warn of settings without effect. `values`: backend ("" = all), setting, checked value."""
    sizes: dict[str, int] = {}
    warnings: list[str] = []
    # Settings of tritonserver's backends that have no counterpart here.
    without_effect = {
        "python": (
            "shm-region-prefix-name",
            "shm-default-byte-size",
            "shm-growth-byte-size",
            "stub-timeout-seconds",
            "thread-pool-size",
        ),
    }
    for backend, setting, value in values:
        spec = registry.find("", backend) if backend else None
        shown = f"--backend-config={backend},{setting}={value}" if backend else f"--backend-config={setting}={value}"
        if backend and spec is None:
            names = ", ".join(sorted(known.name for known in registry.backends))
            warnings.append(f"{shown} has no effect: there is no backend '{backend}'; there are: {names}")
        elif setting == DEFAULT_MAX_BATCH_SIZE:
            sizes["" if spec is None else spec.name] = int(value)
        elif spec is not None and setting in without_effect.get(spec.name, ()):
            warnings.append(f"{shown} has no effect: rocserve has no counterpart")
        else:
            warnings.append(f"{shown} has no effect: rocserve does not know the setting")
    backends = [
        replace(spec, default_max_batch_size=sizes.get(spec.name, sizes.get("", spec.default_max_batch_size)))
        for spec in registry.backends
    ]
    return BackendRegistry(backends), tuple(warnings)
