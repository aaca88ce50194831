"""MIGraphX's calls as they are, without a guard: what a way to MIGraphX must offer for `guarded.py` to build on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from rocserve.backends.migraphx.binding.interface import (
    Array,
    CompileFlags,
    OnnxOptions,
    ProgramTensor,
    TensorflowOptions,
)

Result = TypeVar("Result")


class BareProgram(Protocol):
    """Every method may raise MigraphxError, and trusts its caller to have checked what it is given."""

    def parameters(self) -> Sequence[ProgramTensor]:
        """All of them, buffers for outputs too."""

    def outputs(self) -> Sequence[ProgramTensor]: ...

    def quantize_fp16(self) -> None: ...

    def quantize_bf16(self) -> None: ...

    def quantize_int8(self, target: str, calibration: Sequence[Mapping[str, Array]]) -> None: ...

    def quantize_fp8(self, target: str, calibration: Sequence[Mapping[str, Array]]) -> None: ...

    def compile(self, target: str, flags: CompileFlags) -> None: ...

    def save(self, path: Path) -> None: ...

    def run(self, inputs: Mapping[str, Array], use: Callable[[Sequence[Array]], Result]) -> Result:
        """Runs a compiled program and gives what `use` makes of its outputs.

        `use` is given views on MIGraphX's own memory, which may be an input's too; they are good during its call only.
        """

    def text(self) -> str: ...


class BareBinding(Protocol):
    """As `interface.Binding`, but with bare programs."""

    @property
    def name(self) -> str: ...

    @property
    def migraphx_version(self) -> str: ...

    @property
    def library(self) -> str: ...

    @property
    def releases_gil(self) -> bool: ...

    def check_target(self, target: str) -> None: ...

    def parse_onnx(self, path: Path, options: OnnxOptions) -> BareProgram: ...

    def parse_tensorflow(self, path: Path, options: TensorflowOptions) -> BareProgram: ...

    def load(self, path: Path) -> BareProgram: ...

    def take_messages(self) -> Sequence[str]: ...
