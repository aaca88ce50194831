"""What a compiled program is bound to on this machine, found out without loading MIGraphX or ROCm."""

from __future__ import annotations

from collections.abc import Mapping

from rocserve.backends.host import Host
from rocserve.backends.migraphx.configuration.options import Target
from rocserve.backends.migraphx.planning.recipe import ProgramEnvironment
from rocserve.core.errors import unavailable

_PREFIX = "MIGRAPHX_"
_WITHOUT_EFFECT = ("MIGRAPHX_TRACE_", "MIGRAPHX_TIME_", "MIGRAPHX_DEBUG_", "MIGRAPHX_LOG_")
"""Variables that only make MIGraphX write more (rocm.docs.amd.com, "MIGraphX environment variables")."""


def program_environment(
    target: Target, device: int | None, migraphx_version: str, host: Host | None = None
) -> ProgramEnvironment:
    """What programs for `target` are bound to here.

    Args:
        device: the GPU's number as HIP_VISIBLE_DEVICES takes it; None = 0. Only of use to the target gpu.

    Raises:
        ServeError: UNAVAILABLE, there is no such GPU, or its architecture cannot be told.
    """
    host = host or Host()
    variables = _compiling_variables(host.environment)
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


def _compiling_variables(environment: Mapping[str, str]) -> Mapping[str, str]:
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(_PREFIX) and not name.startswith(_WITHOUT_EFFECT)
    }
