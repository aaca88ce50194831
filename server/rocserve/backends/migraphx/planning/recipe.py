"""All that a compiled program depends on. Equal recipes give equal programs; the cache's key is a recipe's digest."""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rocserve.backends.host import Host
from rocserve.backends.migraphx.configuration.options import CompileOptions, Target
from rocserve.core.errors import unavailable
from rocserve.core.plain import to_json

_PROCEDURE = 1
"""Raised when rocserve goes another way from a model to its program, so that older programs are not taken for it."""


class SourceKind(enum.Enum):
    ONNX = "onnx"
    TENSORFLOW = "tensorflow"


@dataclass(frozen=True, slots=True)
class ProgramEnvironment:
    """What a compiled program is bound to beside its model."""

    migraphx_version: str
    """Of the library, e.g. "2.14.0"."""
    rocm_version: str = ""
    """"" on targets that do without ROCm."""
    gpu_architecture: str = ""
    """E.g. "gfx90a"; "" on targets other than gpu."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that change the program, those that are set: MIGRAPHX_ENABLE_NHWC and the like."""


@dataclass(frozen=True, slots=True)
class ProgramSource:
    kind: SourceKind
    path: str
    """Of the file; not part of the key."""
    digest: str
    """SHA-256 over the file and, in their order, the files of external data that it names."""


@dataclass(frozen=True, slots=True)
class ProgramRecipe:
    """One program: a model at one batch size."""

    source: ProgramSource
    options: CompileOptions
    environment: ProgramEnvironment
    batch_size: int = 0
    """0 = the model has no batch dimension."""
    largest_batch: int = 0
    """Above 0: one program for batches of 1 to this; `batch_size` is then 0."""
    input_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of every input, by its name, batch dimension included (with `largest_batch`: 1 in its place)."""
    rebatched: bool = False
    """The file has another batch size baked in: the program is checked against the file's own before it serves."""
    output_names: tuple[str, ...] = ()
    """What a TensorFlow graph is asked for; ONNX models have their own."""
    calibration_digest: str = ""
    """SHA-256 over the calibration data; "" without."""
    offload_copy: bool = True

    @property
    def title(self) -> str:
        """Its name among the model's programs."""
        if self.largest_batch:
            return f"batch sizes 1 to {self.largest_batch}"
        return f"batch size {self.batch_size}" if self.batch_size else "the program"

    @property
    def key(self) -> str:
        """64 hexadecimal digits: SHA-256 over all of it but where the files lie."""
        anywhere = replace(
            self,
            source=replace(self.source, path=""),
            options=replace(self.options, calibration_data="", calibration_pipeline=""),
        )
        # A mapping's order is the config's or the graph's, and means nothing.
        text = json.dumps([_PROCEDURE, json.loads(to_json(anywhere))], separators=(",", ":"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


_PREFIX = "MIGRAPHX_"
_WITHOUT_EFFECT = ("MIGRAPHX_TRACE_", "MIGRAPHX_TIME_", "MIGRAPHX_DEBUG_", "MIGRAPHX_LOG_")
"""Variables that only make MIGraphX write more (rocm.docs.amd.com, "MIGraphX environment variables")."""


def program_environment(
    target: Target, device: int | None, migraphx_version: str, host: Host | None = None
) -> ProgramEnvironment:
    """What programs for `target` are bound to here, on a GPU by the number of HIP_VISIBLE_DEVICES; None = 0. Raises:
    ServeError: UNAVAILABLE, there is no such GPU, or its architecture is not known."""
    host = host or Host()
    variables = {
        name: value
        for name, value in sorted(host.environment.items())
        if name.startswith(_PREFIX) and not name.startswith(_WITHOUT_EFFECT)
    }
    if target is not Target.GPU:
        return ProgramEnvironment(migraphx_version, variables=variables)
    number = device or 0
    gpu = host.gpu(number)
    if gpu is None:
        raise unavailable(
            f"target gpu needs an AMD GPU, and there is none with number {number} that this process may use"
            f" (looked in {host.system}/class/kfd); in a container pass /dev/kfd and /dev/dri, or set parameter"
            ' "target" to "cpu" or "ref"'
        )
    if not gpu.architecture:
        raise unavailable(
            f"the architecture of GPU {number} cannot be told: the kernel driver is older than Linux 5.15; a newer one,"
            " or HSA_OVERRIDE_GFX_VERSION (such as 9.0.10 for gfx90a), is needed"
        )
    return ProgramEnvironment(migraphx_version, host.rocm_version, gpu.architecture, variables)
