"""Reads the header of a compiled program (.mxr) without loading it, and checks that the program fits this machine.

MIGraphX loads programs for another GPU, or programs that need their tensors in GPU memory, and then crashes or answers
wrongly. MIGraphX only warns if another version of MIGraphX compiled the program. The file tells nearly all of this:

- It is a MessagePack map: version (of the format), migraphx_version, targets, contexts, modules (everything else).
- A program that has not been compiled has no targets.
- GPU kernels are ELF files whose notes name the architecture: "amdgcn-amd-amdhsa--gfx90a".
- A program compiled without offload_copy has parameters "main:#output_0" and so on, the buffers for its outputs.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocserve.backends.migraphx.compiling.recipe import ProgramEnvironment
from rocserve.backends.migraphx.options import Target
from rocserve.core.errors import invalid_argument, unreadable

_HEADS = {
    # MessagePack types whose size follows, with the size's layout. "" = the number itself follows.
    0xC4: (">B", "bytes"), 0xC5: (">H", "bytes"), 0xC6: (">I", "bytes"),
    0xD9: (">B", "text"), 0xDA: (">H", "text"), 0xDB: (">I", "text"),
    0xDC: (">H", "list"), 0xDD: (">I", "list"),
    0xDE: (">H", "map"), 0xDF: (">I", "map"),
    **{kind: (f">{code}", "") for kind, code in enumerate("fdBHIQbhiq", 0xCA)},
}  # fmt: skip
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


class _MessagePack:
    """Parses MessagePack values (msgpack's spec.md). Raises ValueError if a value is malformed or incomplete."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def entries(self, until: str) -> Mapping[str, Any]:
        """Parse the entries of a map up to the key `until`."""
        what, size = self._head()
        if what != "map":
            raise ValueError(f"it begins with byte 0x{self._data[0]:02x}, which does not begin a map")
        entries: dict[str, Any] = {}
        for _ in range(size):
            key = self.value()
            if key == until:
                return entries
            if not isinstance(key, str):
                raise ValueError("a key that is not text")
            entries[key] = self.value()
        raise ValueError(f"no entry '{until}'")

    def value(self, depth: int = 0) -> Any:
        if depth > 8:
            raise ValueError("values are nested too deeply")
        what, content = self._head()
        if what == "text":
            return self._take(content).decode()
        if what == "bytes":
            return self._take(content)
        # Each entry takes at least one byte, so the loops end with the data.
        if what == "list":
            return [self.value(depth + 1) for _ in range(content)]
        if what == "map":
            return {str(self.value(depth + 1)): self.value(depth + 1) for _ in range(content)}
        return content

    def _head(self) -> tuple[str, Any]:
        """Return the next value's type and size; or "" and the value itself."""
        kind = self._take(1)[0]
        if kind < 0x80 or kind >= 0xE0:
            return "", kind if kind < 0x80 else kind - 0x100
        if kind < 0xA0:
            return "map" if kind < 0x90 else "list", kind & 0x0F
        if kind < 0xC0:
            return "text", kind & 0x1F
        if kind in _CONSTANTS:
            return "", _CONSTANTS[kind]
        if kind not in _HEADS:
            raise ValueError(f"a value of kind 0x{kind:02x}")
        layout, what = _HEADS[kind]
        return what, struct.unpack(layout, self._take(struct.calcsize(layout)))[0]

    def _take(self, size: int) -> bytes:
        start = self._position
        if size > len(self._data) - start:
            raise ValueError(f"it ends within a value of {size} bytes at byte {start}")
        self._position += size
        return self._data[start : self._position]


@dataclass(frozen=True, slots=True)
class MxrFile:
    format_version: int
    migraphx_version: str
    targets: tuple[str, ...]
    """Empty = not compiled."""
    architectures: tuple[str, ...]
    """The GPU architectures of its kernels; empty = no kernels, or kernels that name none."""
    wants_output_buffers: bool
    """Whether the program was compiled without offload_copy."""


def read_mxr(path: Path) -> MxrFile:
    """Read a header. Raises ServeError (INVALID_ARGUMENT) if the file cannot be read, or is not a compiled program."""
    try:
        with path.open("rb") as file:
            header = file.read(1 << 16)
            if not header:
                raise invalid_argument(f"MIGraphX program {path.name} is empty; copy it again")
            entries = _MessagePack(header).entries(until="modules")
            version, migraphx_version = entries.get("version"), entries.get("migraphx_version")
            targets = entries.get("targets")
            if type(version) is not int or not isinstance(migraphx_version, str) or not isinstance(targets, list):
                raise ValueError("it lacks its version, MIGraphX's version or its targets")
            names = [str(one["name"]) for one in targets if isinstance(one, dict) and isinstance(one.get("name"), str)]
            if len(names) < len(targets):
                raise ValueError("its targets have no names")
            file.seek(0)
            architectures: set[str] = set()
            wants_buffers = False
            tail = b""
            while chunk := file.read(1 << 22):
                text = tail + chunk
                # A name at the very end may be cut off. The next chunk is read with an overlap, and holds all of it.
                kernels = re.finditer(rb"amdgcn-amd-amdhsa--(gfx[0-9a-f]+(?:-[0-9a-f-]*generic)?)", text)
                architectures.update(match[1].decode() for match in kernels if match.end() < len(text))
                wants_buffers = wants_buffers or b"main:#output_" in text
                tail = text[-128:]
    except OSError as error:
        raise unreadable(f"MIGraphX program {path.name} cannot be read: {error.strerror}", error) from None
    except ValueError as error:
        raise invalid_argument(
            f"MIGraphX program {path.name} is damaged or not an .mxr file ({error}); copy or compile it again"
        ) from None
    return MxrFile(version, migraphx_version, tuple(names), tuple(sorted(architectures)), wants_buffers)


def check_mxr(path: Path, environment: ProgramEnvironment, target: Target) -> MxrFile:
    """Read a file's header, and check that it fits `environment`, which programs for `target` have on this machine.
    Raises ServeError (INVALID_ARGUMENT) if the file is damaged or made for another machine; the caller may compile
    `sibling_model` instead."""
    program = read_mxr(path)
    installed, here = environment.migraphx_version, environment.gpu_architecture.partition(":")[0]
    foreign = [one for one in program.architectures if one != here and not one.endswith("generic")]
    fault = ""
    if not program.targets:
        fault = "has not been compiled, only saved"
    elif installed and program.migraphx_version != installed:
        fault = (
            f"was compiled by MIGraphX {program.migraphx_version} (file version {program.format_version}), and this is"
            f" MIGraphX {installed}"
        )
    elif program.targets != (target.value,):
        fault = f"was compiled for target {', '.join(program.targets)}, but is to run on target {target.value}"
    elif target is Target.GPU and foreign:
        fault = f"was compiled for GPU architecture {', '.join(foreign)}, and this GPU is {here or 'unknown'}"
    elif program.wants_output_buffers and target is not Target.GPU:
        fault = "was compiled without offload_copy, so it takes and returns tensors only in GPU memory"
    if fault:
        raise invalid_argument(
            f"MIGraphX program {path.name} {fault}; compile it again here (rocserve compile), with offload_copy, or put"
            f" its ONNX file next to it as {path.with_suffix('.onnx').name}, which is then compiled at the load"
        )
    return program


def sibling_model(path: Path) -> Path | None:
    """Return the ONNX file that may replace a .mxr file: the same name with .onnx, else model.onnx; None = neither."""
    for candidate in (path.with_suffix(".onnx"), path.with_name("model.onnx")):
        if candidate.is_file():
            return candidate
    return None
