"""Finds the inputs that a package of AOTInductor was compiled for, from the source in the package.

The package itself does not check its inputs: it would read an input of other sizes or another datatype beyond its end,
and return other memory.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from rocserve.backends.pytorch.datatypes import datatype_of
from rocserve.backends.pytorch.exported_file import only_name
from rocserve.backends.pytorch.open_sizes import (
    LEAST_TRIED,
    UNBOUNDED,
    OpenSize,
    SizeCondition,
    bounds_text,
    check_sizes,
)
from rocserve.backends.pytorch.program import ProgramTensor
from rocserve.core.datatypes import DataType
from rocserve.core.errors import invalid_argument
from rocserve.core.requests import TensorSpec

_FOLDER = "data/aotinductor/"
"""Holds a folder with the code of each program."""

NumbersByDimension = Mapping[tuple[str, int], int]
"""(Input name, dimension) -> number."""


@dataclass(frozen=True, slots=True)
class PackageSource:
    """The inputs as the package's source describes them."""

    inputs: tuple[ProgramTensor, ...]
    """Without names. No open size in a dimension that varies = the source does not relate it to other sizes."""
    conditions: tuple[SizeCondition, ...]
    """Equations that give sizes from other sizes."""

    @property
    def most_rows(self) -> int | None:
        """None = no limit."""
        rows = [one.open_sizes[0] for one in self.inputs if one.open_sizes]
        return min((own.most for own in rows if own is not None and own.most is not None), default=None)

    def check(self, specs: Sequence[TensorSpec], batches: bool) -> None:
        """Check the inputs' specs, in the program's order. `batches`: whether the first dimension of all inputs is the
        batch. Raises ServeError (INVALID_ARGUMENT) if the package was compiled for other datatypes or sizes, or if its
        source does not relate sizes that may vary."""
        for spec, own in zip(specs, self.inputs, strict=True):
            assert own.datatype is not None and own.shape is not None, "the source says them"
            given = f"input '{spec.name}' is {spec.datatype.value} {list(spec.shape)} in config.pbtxt"
            if spec.datatype is DataType.BYTES:
                raise invalid_argument(
                    f"input '{spec.name}' has TYPE_STRING in config.pbtxt, but packages take tensors"
                )
            if (
                spec.datatype is not own.datatype
                or len(spec.shape) != len(own.shape)
                or any(size not in (-1, declared) for declared, size in zip(spec.shape, own.shape, strict=True))
            ):
                raise invalid_argument(
                    f"{given}, but the package was compiled for {own.datatype.value} {list(own.shape)}; change"
                    " config.pbtxt, or compile the program for its shape"
                )
            if own.strides:
                raise invalid_argument(
                    f"{given}, but the package was compiled for an input with another memory layout;"
                    " export the program with an example that is contiguous()"
                )
            for dimension, (size, declared) in enumerate(zip(own.open_sizes, spec.shape, strict=True)):
                if (
                    size is not None
                    and declared != -1
                    and (declared < size.least or (size.most is not None and declared > size.most))
                ):
                    raise invalid_argument(
                        f"{given}, but the package was compiled for {bounds_text(size)} in dimension {dimension}; write"
                        " one of these sizes in config.pbtxt, or compile the program for its shape"
                    )
        if all(size != -1 for spec in specs for size in spec.shape):
            self.check_sizes([spec.name for spec in specs], specs)
        self._require_known(specs, batches)

    def check_sizes(self, names: Sequence[str], values: Sequence[Any]) -> None:
        """Check the sizes in each value's `shape`. Raises ServeError (INVALID_ARGUMENT) if they do not agree, or exceed
        the bounds that the package was compiled with."""
        check_sizes(names, [own.open_sizes for own in self.inputs], self.conditions, values, "compiled")

    def _require_known(self, specs: Sequence[TensorSpec], batches: bool) -> None:
        """Raises ServeError (INVALID_ARGUMENT) if sizes may vary that the source does not relate to others."""
        unknown: list[tuple[int, int]] = []
        varying: list[tuple[int, int]] = []
        for position, tensor in enumerate(self.inputs):
            for dimension, size in enumerate(tensor.shape or ()):
                if size == -1 and tensor.open_sizes[dimension] is None:
                    unknown.append((position, dimension))
                if specs[position].shape[dimension] == -1:
                    varying.append((position, dimension))
        # All inputs of a batch have equally many rows.
        if not unknown or not varying or (batches and not any(dimension for _, dimension in (*unknown, *varying))):
            return
        position, dimension = unknown[0]
        raise invalid_argument(
            f"dimension {dimension} of input '{specs[position].name}' varies in the package, which does not relate it"
            " to the other inputs' sizes, so inputs that do not match would be read beyond their end; compile the"
            " program with PyTorch 2.13 or newer, which writes the relation into the package, give all sizes as numbers"
            " in config.pbtxt, or serve the program that torch.export.save writes"
        )


def read_metadata(path: Path, name: str) -> Mapping[str, str]:
    """Return a package's description of the machine that it was compiled for; empty if it cannot be read: loading it
    reports why."""
    found: dict[str, str] = {}
    with suppress(OSError, TypeError, ValueError, zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            is_metadata = f"{_FOLDER}{name}/" in member.filename and member.filename.endswith("wrapper_metadata.json")
            if is_metadata and member.file_size <= 1 << 20:
                entries = json.loads(archive.read(member))
                found.update((str(key), str(value)) for key, value in dict(entries).items())
    return found


def package_name(path: Path) -> str:
    """Return the name of the package's program. Raises ServeError (INVALID_ARGUMENT) as `only_name`."""
    with zipfile.ZipFile(path) as archive:
        inside = [name.partition(_FOLDER)[2] for name in archive.namelist()]
    return only_name((name.partition("/")[0] for name in inside if "/" in name), "the packages")


def read_source(path: Path, name: str) -> PackageSource:
    """Read the source of a package's program. Raises ServeError (INVALID_ARGUMENT) if the package lacks its source."""
    # Only the source file that takes the inputs contains this text.
    found = [source for source in _sources(path, name) if "::run_impl(" in source]
    text = found[0] if len(found) == 1 else ""
    named = re.findall(r"\bauto (\w+) = std::move\(inputs\[(\d+)\]\);", text)
    names = [name for name, _ in sorted(named, key=lambda input_: int(input_[1]))]
    datatypes = {
        name: getattr(torch, datatype, None)
        for name, datatype in re.findall(r"\bint32_t (\w+)_expected_dtype = aoti_torch_dtype_(\w+)\(\);", text)
    }
    if not text or any(not isinstance(datatypes.get(name), torch.dtype) for name in names):
        raise invalid_argument(
            f"{path.name} lacks the source of its code, from which the server reads its datatypes and sizes; write it"
            " with torch._inductor.aoti_compile_and_package, and remove nothing from it"
        )
    return _parse_source(text, names, datatypes)


def smallest_table(path: Path, name: str) -> int | None:
    """Return the rows of the smallest table that a package's code for the CPU indexes; None = it indexes none."""
    # The error of an index that is checked. A table whose size varies is not found.
    return min(
        (
            int(size)
            for source in _sources(path, name)
            for size in re.findall(r'"index out of bounds: 0 <= \w+ < (\d+)L*"', source)
        ),
        default=None,
    )


def _sources(path: Path, name: str) -> Sequence[str]:
    folder = f"{_FOLDER}{name}/"
    with zipfile.ZipFile(path) as archive:
        return [
            archive.read(member).decode(errors="replace")
            for member in archive.infolist()
            if folder in member.filename and member.filename.endswith(".cpp") and member.file_size <= 1 << 28
        ]


def _parse_source(text: str, names: Sequence[str], datatypes: Mapping[str, torch.dtype]) -> PackageSource:
    # The statements that check an input's sizes and strides.
    checks = (
        r"\bif \((?P<value>\d+) != (?P<input>\w+)_size\[(?P<dimension>\d+)\]\)",
        r"\bif \((?P<input>\w+)_size\[(?P<dimension>\d+)\] < (?P<value>\d+)\)",
        r"\bif \((?P<input>\w+)_size\[(?P<dimension>\d+)\] > (?P<value>\d+)\)",
        r"\bif \((?P<value>\d+) != (?P<input>\w+)_stride\[(?P<dimension>\d+)\]\)",
    )
    fixed, least, most, strides = (_numbers(pattern, text) for pattern in checks)
    dimension_of = {
        symbol: (name, int(dimension))
        for symbol, name, dimension in re.findall(r"\bint64_t (s\d+) = (\w+)_size\[(\d+)\];", text)
    }
    symbol_of = {key: symbol for symbol, key in dimension_of.items()}
    # PyTorch 2.13 and newer write this line, with all sizes as expressions of symbols.
    asserted_sizes = {
        name: _split(expressions)
        for name, expressions in re.findall(r'\bassert_size_stride\((\w+), \{([^{}]*)\}, \{[^{}]*\}, "input"\)', text)
    }
    ranks = {name: len(asserted_sizes.get(name, ())) for name in names}
    for name, dimension in (*fixed, *least, *most, *strides, *symbol_of):
        ranks[name] = max(ranks.get(name, 0), dimension + 1)
    open_dimensions = [
        (name, dimension) for name in names for dimension in range(ranks[name]) if (name, dimension) not in fixed
    ]
    size_names = {
        symbol: f"size_{names.index(name)}_{dimension}"
        for symbol, (name, dimension) in dimension_of.items()
        if name in names
    }
    size_equations: dict[tuple[int, int], SizeCondition] = {}

    def size(name: str, dimension: int) -> int | OpenSize | None:
        key = name, dimension
        if key in fixed:
            return fixed[key]
        size_name = f"size_{names.index(name)}_{dimension}"
        expression = asserted_sizes[name][dimension] if name in asserted_sizes else symbol_of.get(key, "")
        if expression in size_names:
            return _open_size(expression, dimension_of[expression], least, most)
        right_side = re.sub(r"\bs\d+\b", lambda symbol: size_names.get(symbol[0], symbol[0]), expression)
        try:
            size_equations[names.index(name), dimension] = SizeCondition(f"{size_name} == {right_side}")
        except ValueError:  # The source has no such expression, or one of an unknown form.
            return _open_size(size_name, key, least, most) if len(open_dimensions) == 1 else None
        return OpenSize(size_name, 1, 0, 0, None)

    sizes = [[size(name, dimension) for dimension in range(ranks[name])] for name in names]
    samples = [
        [one if isinstance(one, int) else 1 if one is None else max(1, one.least) for one in own] for own in sizes
    ]
    for (position, dimension), condition in size_equations.items():
        samples[position][dimension] = condition.right_side(samples)
    inputs = []
    for name, own, sample in zip(names, sizes, samples, strict=True):
        fixed_strides = {dimension: stride for (input_, dimension), stride in strides.items() if input_ == name}
        tensor = ProgramTensor(
            (),
            datatype_of(datatypes[name], "an input"),
            tuple(one if isinstance(one, int) else -1 for one in own),
            tuple(sample),
            tuple(one if isinstance(one, OpenSize) else None for one in own),
            strides=() if _is_contiguous(own, fixed_strides) else tuple(fixed_strides.values()),
        )
        inputs.append(tensor)
    return PackageSource(tuple(inputs), tuple(size_equations.values()))


def _numbers(pattern: str, text: str) -> NumbersByDimension:
    return {(found["input"], int(found["dimension"])): int(found["value"]) for found in re.finditer(pattern, text)}


def _split(expressions: str) -> list[str]:
    """Split C++ expressions at commas outside of brackets, and convert them to Python."""
    # Parts of a C++ expression, and their form in Python.
    forms = {
        r"\b(\d+)L+\b": r"\1",
        "static_cast<int64_t>": "",
        "c10::div_floor_integer": "FloorDiv",
        r"std::(max|min)\b": r"\1",
    }
    for pattern, replacement in forms.items():
        expressions = re.sub(pattern, replacement, expressions)
    parts, depth = [""], 0
    for character in expressions:
        depth += (character == "(") - (character == ")")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def _open_size(number: str, key: tuple[str, int], least: NumbersByDimension, most: NumbersByDimension) -> OpenSize:
    """Make an open size. `number`: its name. `key`: the input and dimension whose bounds the source checks."""
    lower, upper = least.get(key, 0), most.get(key, UNBOUNDED)
    return OpenSize(number, 1, 0, lower if lower > LEAST_TRIED else 0, upper if upper < UNBOUNDED else None)


def _is_contiguous(sizes: Sequence[int | OpenSize | None], strides: Mapping[int, int]) -> bool:
    """Return whether the layout is contiguous. `strides`: those that are fixed, by dimension."""
    for dimension, stride in strides.items():
        inner_sizes = [size for size in sizes[dimension + 1 :] if isinstance(size, int)]
        are_fixed = len(inner_sizes) == len(sizes) - dimension - 1
        if sizes[dimension] != 1 and not (are_fixed and stride == prod(inner_sizes)):
            return False
    return True
