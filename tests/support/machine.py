"""A machine described by a test: its GPUs and its MIGraphX need not exist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rocserve.backends.base import EngineSpec
from rocserve.backends.installed import has_file, is_installed


@dataclass(frozen=True)
class ToldMachine:
    """Implements backends.base.Machine."""

    gpus: Sequence[int] = ()
    migraphx: str = "it is not installed"
    words: tuple[str, ...] = ()
    """Words in front of the interpreter of workers that load MIGraphX."""

    architectures: Mapping[int, str] = field(default_factory=dict)
    policies: Mapping[str, Sequence[int]] = field(default_factory=dict)
    instances: int = 256

    def architecture(self, gpu: int) -> str:
        return self.architectures.get(gpu, "")

    def cores(self, policy: str) -> Sequence[int]:
        return self.policies.get(policy, ())

    def is_installed(self, module: str, files: tuple[str, ...] = ()) -> bool:
        return has_file(module, files) if files else is_installed(module)

    def most_instances(self, gpus: int) -> int:
        return self.instances * max(gpus, 1)

    def loader(self, engine: EngineSpec) -> tuple[str, ...]:
        return self.words if engine.needs_migraphx else ()
