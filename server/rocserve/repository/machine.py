"""The machine that the server runs on: its GPUs, installed engines and CPU cores."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rocserve.backends.base import EngineSpec
from rocserve.backends.host import Host
from rocserve.backends.installed import has_file, is_installed
from rocserve.backends.migraphx.installation import find_installation
from rocserve.backends.parameters import usable_cpus
from rocserve.core.errors import ServeError, internal, invalid_argument
from rocserve.settings import EngineSettings

_NODE = "numa-node"


class ThisMachine:
    """Implements backends.base.Machine. Nothing is cached, so software that is installed later is found by the next
    load; each query takes milliseconds. Loads no engine."""

    def __init__(
        self,
        settings: EngineSettings,
        host_policies: Iterable[tuple[str, str, str]] = (),
        most_instances: int | None = None,
        nodes: Path = Path("/sys/devices/system/node"),
    ) -> None:
        """`host_policies`: policy, setting, value. `most_instances`: of one model; None = by the number of CPUs or
        GPUs. `nodes`: the folder in which Linux describes NUMA nodes."""
        self._settings = settings
        self._most_instances = most_instances
        self._nodes = nodes
        self._host_policies: defaultdict[str, dict[str, str]] = defaultdict(dict)
        for policy, setting, value in host_policies:
            self._host_policies[policy][setting] = value

    @property
    def gpus(self) -> Sequence[int]:
        return Host().gpus

    @property
    def migraphx(self) -> str:
        try:
            find_installation(self._settings)
        except ServeError as error:
            return error.text
        return ""

    def is_installed(self, module: str, files: tuple[str, ...] = ()) -> bool:
        return has_file(module, files) if files else is_installed(module)

    def architecture(self, gpu: int) -> str:
        found = Host().gpu(gpu)
        return "" if found is None else found.architecture

    def most_instances(self, gpus: int) -> int:
        # On a GPU each instance is a process with a GPU context of hundreds of MB. On a CPU computing instances need
        # one CPU each, waiting instances may share one.
        return self._most_instances or (64 * gpus if gpus else 8 * usable_cpus())

    def loader(self, engine: EngineSpec) -> tuple[str, ...]:
        return find_installation(self._settings).loader if engine.needs_migraphx else ()

    def cores(self, policy: str) -> Sequence[int]:
        """Return a policy's cores, ascending: its `cpu-cores`, else those of its `numa-node`; empty = no such
        policy, so any core. Raises ServeError: INVALID_ARGUMENT for an unreadable setting; INTERNAL for missing
        nodes or cores."""
        settings: Mapping[str, str] = self._host_policies.get(policy, {})
        if "cpu-cores" in settings:
            wanted = {core for part in settings["cpu-cores"].split(",") for core in _range(part)}
        elif _NODE in settings:
            wanted = self._cores_of_node(settings[_NODE])
        else:
            return ()
        usable = wanted & os.sched_getaffinity(0)
        if not usable:
            raise internal(
                f"Unable to set NUMA thread affinity: host policy '{policy}' names the cores {_shown(wanted)}, of which"
                f" this process may use none; it may use {_shown(os.sched_getaffinity(0))}"
            )
        return sorted(usable)

    def _cores_of_node(self, text: str) -> set[int]:
        if not text.isdecimal():
            raise invalid_argument(f"host policy setting '{_NODE}' is the number of a NUMA node. Got {text}")
        try:
            listed = (self._nodes / f"node{int(text)}" / "cpulist").read_text().strip()
        except OSError:
            raise internal(
                f"Unable to set NUMA memory policy: this machine has no NUMA node {text}; it has"
                f" {', '.join(sorted(path.name for path in self._nodes.glob('node[0-9]*'))) or 'none'}"
            ) from None
        # Linux writes a single core as one number.
        return {
            core for part in listed.split(",") if part for core in _range(part if "-" in part else f"{part}-{part}")
        }


def _range(text: str) -> range:
    lower, dash, upper = text.strip().partition("-")
    # Linux supports no higher number of a core.
    if not dash or not lower.isdecimal() or not upper.isdecimal() or not int(lower) <= int(upper) < 1 << 16:
        raise invalid_argument(
            "host policy setting 'cpu-cores' format is '<lower_cpu_core_id>-<upper_cpu_core_id>'. Got " + text
        )
    return range(int(lower), int(upper) + 1)


def _shown(cores: Iterable[int]) -> str:
    return ",".join(map(str, sorted(cores)))
