"""Describes all that a compiled program depends on. Equal recipes give equal programs, and equal keys in the cache."""

from __future__ import annotations

import enum
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rocserve.backends.host import Host
from rocserve.backends.migraphx.options import CompileOptions, Target
from rocserve.core.errors import unavailable
from rocserve.core.plain import to_json

_COMPILE_REVISION = 1
"""Increase it when rocserve compiles programs in a new way, so that older cached programs are not used."""


_SKIP_MEASURING = "MIGRAPHX_SKIP_BENCHMARKING"


class SourceKind(enum.Enum):
    ONNX = "onnx"
    TENSORFLOW = "tensorflow"


@dataclass(frozen=True, slots=True)
class ProgramEnvironment:
    """The properties of the machine and its software that a compiled program depends on."""

    migraphx_version: str
    rocm_version: str = ""
    """"" = the target does not use ROCm."""
    gpu_architecture: str = ""
    """E.g. "gfx90a"; "" = the target is not gpu."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """The environment variables that are set and change programs, such as MIGRAPHX_ENABLE_NHWC."""

    @property
    def measuring(self) -> ProgramEnvironment:
        """The environment in which MIGraphX measures which kernels are fastest."""
        if self.variables.get(_SKIP_MEASURING, "").lower() not in ("1", "enable", "enabled", "yes", "true"):
            return self
        variables = {name: value for name, value in self.variables.items() if name != _SKIP_MEASURING}
        return replace(self, variables=variables)


@dataclass(frozen=True, slots=True)
class ProgramSource:
    """The model file that a program is compiled from."""

    kind: SourceKind
    path: str
    """The file's path, which is not part of the key."""
    digest: str
    """SHA-256 over the file, then its external data files in their order."""


@dataclass(frozen=True, slots=True)
class ProgramRecipe:
    """Describes one program: a model at one batch size, and at one size of each dimension that is padded."""

    source: ProgramSource
    options: CompileOptions
    environment: ProgramEnvironment
    batch_size: int = 0
    """0 = the model has no batch dimension."""
    input_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Input's name -> shape, for all inputs, with the batch dimension."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Dimension that is padded -> its size in `input_shapes`, in the order of the model's Padding."""
    rebatched: bool = False
    """Whether the file fixes another batch size. If so, the program is compared with a program of that size."""
    output_names: tuple[str, ...] = ()
    """The requested outputs of a TensorFlow graph. Empty for ONNX models, whose files name their outputs."""
    calibration_digest: str = ""
    """SHA-256 over the calibration data and their pipeline; "" = the precision needs none."""

    @property
    def title(self) -> str:
        """The program's name among the model's programs, as users read it."""
        rows = [f"batch size {self.batch_size}"] if self.batch_size else []
        return ", ".join((*rows, *(f"{label} {size}" for label, size in self.sizes.items()))) or "the program"

    @property
    def short_title(self) -> str:
        """The title where other words tell what the numbers are: batch size x sizes."""
        rows = [self.batch_size] if self.batch_size else []
        return "x".join(map(str, (*rows, *self.sizes.values()))) or "all"

    @property
    def untuned(self) -> ProgramRecipe | None:
        """The recipe of a program that compiles without measuring which kernels are fastest; None = MIGraphX cannot do
        that here, or the operator has configured it."""
        version = tuple(int(number) for number in re.findall(r"\d+", self.environment.migraphx_version)[:2])
        variables = self.environment.variables
        # MIGraphX knows the variable since 2.16.
        if self.options.target is not Target.GPU or version < (2, 16) or _SKIP_MEASURING in variables:
            return None
        environment = replace(self.environment, variables={**variables, _SKIP_MEASURING: "1"})
        options = replace(self.options, exhaustive_tune=False, miopen_tuning=False)
        return replace(self, environment=environment, options=options)

    @property
    def key(self) -> str:
        """64 hexadecimal digits: the SHA-256 over the recipe without file paths."""
        anywhere = replace(
            self,
            source=replace(self.source, path=""),
            options=replace(self.options, calibration_data="", calibration_pipeline=""),
        )
        facts = json.loads(to_json(anywhere))
        # The input shapes decide what is compiled; the names of their places have no effect.
        del facts["sizes"]
        # Mappings keep the order of the configuration or the graph, which has no meaning.
        text = json.dumps([_COMPILE_REVISION, facts], separators=(",", ":"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def changes_programs(variable: str) -> bool:
    """Return whether it is a variable of MIGraphX that may change compiled programs."""
    # These variables only make MIGraphX log more (rocm.docs.amd.com, "MIGraphX environment variables").
    return variable.startswith("MIGRAPHX_") and not variable.startswith(
        ("MIGRAPHX_TRACE_", "MIGRAPHX_TIME_", "MIGRAPHX_DEBUG_", "MIGRAPHX_LOG_")
    )


def program_environment(
    target: Target, device: int | None, migraphx_version: str, host: Host | None = None
) -> ProgramEnvironment:
    """Return the environment of programs for `target`. `device`: the GPU's number within HIP_VISIBLE_DEVICES; None = 0.
    Raises ServeError (UNAVAILABLE) if there is no such GPU, or its architecture is unknown."""
    host = host or Host()
    variables = {name: value for name, value in sorted(host.environment.items()) if changes_programs(name)}
    if target is not Target.GPU:
        return ProgramEnvironment(migraphx_version, variables=variables)
    number = device or 0
    gpu = host.gpu(number)
    if gpu is None:
        raise unavailable(
            f"target gpu needs an AMD GPU, and this process cannot use a GPU with number {number}"
            f" (looked in {host.system}/class/kfd); in a container pass /dev/kfd and /dev/dri, or set parameter"
            ' "target" to "cpu" or "ref"'
        )
    if not gpu.architecture:
        raise unavailable(
            f"the architecture of GPU {number} is unknown, because the kernel driver is older than Linux 5.15; install"
            " a newer one, or set HSA_OVERRIDE_GFX_VERSION (such as 9.0.10 for gfx90a)"
        )
    return ProgramEnvironment(migraphx_version, host.rocm_version, gpu.architecture, variables)
