"""Settings of backends from the command line (--backend-config), under tritonserver's names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rocserve.backends.registry import BackendRegistry
from rocserve.settings import DEFAULT_MAX_BATCH_SIZE

_WITHOUT_EFFECT = {
    "python": (
        "shm-region-prefix-name",
        "shm-default-byte-size",
        "shm-growth-byte-size",
        "stub-timeout-seconds",
        "thread-pool-size",
    ),
}
"""What tritonserver's backends tune where there is nothing to tune here."""


def with_backend_config(
    registry: BackendRegistry, values: Iterable[tuple[str, str, str]]
) -> tuple[BackendRegistry, tuple[str, ...]]:
    """The backends as the settings make them, and the warnings of settings without effect.

    Args:
        values: backend ("" = all), setting, value; numbers have been checked.
    """
    sizes: dict[str, int] = {}
    warnings: list[str] = []
    for backend, setting, value in values:
        spec = registry.find("", backend) if backend else None
        shown = f"--backend-config={backend},{setting}={value}" if backend else f"--backend-config={setting}={value}"
        if backend and spec is None:
            names = ", ".join(sorted(known.name for known in registry.backends))
            warnings.append(f"{shown} has no effect: there is no backend '{backend}'; there are: {names}")
        elif setting == DEFAULT_MAX_BATCH_SIZE:
            sizes["" if spec is None else spec.name] = int(value)
        elif spec is not None and setting in _WITHOUT_EFFECT.get(spec.name, ()):
            warnings.append(f"{shown} has no effect: rocserve has nothing that it could tune")
        else:
            warnings.append(f"{shown} has no effect: rocserve knows no such setting")
    backends = [
        replace(spec, default_max_batch_size=sizes.get(spec.name, sizes.get("", spec.default_max_batch_size)))
        for spec in registry.backends
    ]
    return BackendRegistry(backends), tuple(warnings)
