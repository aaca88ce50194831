"""What the server knows of the machine that it runs on."""

from __future__ import annotations

from collections.abc import Sequence

from rocserve.backends.base import EngineSpec
from rocserve.backends.gpus import find_gpu, visible_gpus
from rocserve.backends.installed import has_file, is_installed
from rocserve.backends.migraphx.installation import find_installation
from rocserve.backends.parameters import usable_cpus
from rocserve.core.errors import ServeError
from rocserve.repository.host_policies import HostPolicies
from rocserve.settings import EngineSettings

_INSTANCES_A_CPU = 8
"""Instances that compute need one CPU each; those that wait, for other models or services, may share one."""
_INSTANCES_A_GPU = 64
"""Each is a process with a context of the GPU, which takes hundreds of MB of its memory."""


class ThisMachine:
    """Implements backends.base.Machine. Each question is answered anew, in milliseconds: what is installed while the
    server runs is there for the next load. Loads no engine."""

    def __init__(
        self, settings: EngineSettings, host_policies: HostPolicies | None = None, most_instances: int | None = None
    ) -> None:
        """`most_instances`: of a model; None = by the number of CPUs or GPUs."""
        self._settings = settings
        self._most_instances = most_instances
        self._host_policies = host_policies or HostPolicies()

    @property
    def gpus(self) -> Sequence[int]:
        return visible_gpus()

    @property
    def architectures(self) -> Sequence[str]:
        """Of each of the GPUs, e.g. "gfx90a"; "" where it is not known."""
        found = (find_gpu(number) for number in visible_gpus())
        return tuple("" if gpu is None else gpu.architecture for gpu in found)

    @property
    def migraphx(self) -> str:
        try:
            find_installation(self._settings)
        except ServeError as error:
            return error.text
        return ""

    def is_installed(self, module: str, files: tuple[str, ...] = ()) -> bool:
        """See backends.base.Machine."""
        return has_file(module, files) if files else is_installed(module)

    def architecture(self, gpu: int) -> str:
        """See backends.base.Machine."""
        found = find_gpu(gpu)
        return "" if found is None else found.architecture

    def cores(self, policy: str) -> Sequence[int]:
        """See backends.base.Machine."""
        return self._host_policies.cores(policy)

    def most_instances(self, gpus: int) -> int:
        """See backends.base.Machine."""
        return self._most_instances or (_INSTANCES_A_GPU * gpus if gpus else _INSTANCES_A_CPU * usable_cpus())

    def loader(self, engine: EngineSpec) -> tuple[str, ...]:
        """See backends.base.Machine."""
        return find_installation(self._settings).loader if engine.needs_migraphx else ()
