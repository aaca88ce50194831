"""The machine as a worker finds it: where its kernel and ROCm tell what there is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rocserve.backends.gpus import Gpu, find_gpu

_VERSION_FILES = (".info/version", "core/.info/version")
"""Of ROCm 7 and of ROCm 10, in their folder."""


@dataclass(frozen=True, slots=True)
class Host:
    """This machine, or what a test puts in its place."""

    system: Path = Path("/sys")
    processes: Path = Path("/proc")
    rocm: Path = Path("/opt/rocm")
    variables: Mapping[str, str] | None = None
    """None = this process' own."""

    @property
    def environment(self) -> Mapping[str, str]:
        return os.environ if self.variables is None else self.variables

    def gpu(self, number: int) -> Gpu | None:
        """The GPU that HIP_VISIBLE_DEVICES of a worker calls `number`."""
        return find_gpu(number, self.environment, self.system / "class/kfd/kfd/topology/nodes")

    @property
    def rocm_version(self) -> str:
        """E.g. "7.1.1", without the number of the build that may follow it ("7.1.1-38"); "" where ROCm is not
        installed. ROCm's packages write it to their folder, which $ROCM_PATH names."""
        folder = Path(self.environment.get("ROCM_PATH") or self.rocm)
        for name in _VERSION_FILES:
            try:
                return (folder / name).read_text().strip().partition("-")[0]
            except (OSError, UnicodeDecodeError):
                continue
        return ""
