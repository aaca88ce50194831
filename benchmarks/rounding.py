"""How far rounding moves the outputs of networks: `python -m benchmarks.rounding FILE.pt2 ...`.

The distance is the one by which the engine migraphx judges programs of torch_migraphx, for the same inputs, and for the
first row of FILE.npy if that lies next to the file. fp32 has factors of products rounded to ten bits, as some GPUs do;
fp16 and bf16 are weights and computation; int8 is FILE_int8.pt2, as `rocserve quantise` writes it, on ONNX Runtime
instead of PyTorch.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from rocserve.backends.pytorch.exported_file import read_exported
from rocserve.backends.pytorch.onnx_file import write_onnx
from rocserve.backends.pytorch.program import DTYPES, Program, open_exported
from rocserve.backends.pytorch.results import outputs_of
from rocserve.backends.pytorch.torch_migraphx import relative_error, trial_inputs

ROWS = 1
PRODUCTS = ("convolution", "addmm", "mm", "bmm")
DROPPED_BITS = 13
"""Bits that are cut off fp32's 23."""


class RoundedProducts(TorchDispatchMode):  # type: ignore[misc]
    """Rounds the factors of products to ten bits."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket.__name__ in PRODUCTS:
            args = pytree.tree_map_only(torch.Tensor, _rounded, args)
        return function(*args, **(kwargs or {}))


def _rounded(value: Any) -> Any:
    bits = value.contiguous().view(torch.int32) + (1 << (DROPPED_BITS - 1))
    return (bits & -(1 << DROPPED_BITS)).view(torch.float32)


def outputs(program: Program, values: Sequence[Any]) -> list[Any]:
    with torch.no_grad():
        return outputs_of(program.call([value.clone() for value in values]))


def by_onnx_runtime(file: Path, program: Program, values: Sequence[Any]) -> list[Any]:
    names = program.signature.default_names
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        write_onnx(read_exported(file), path, *names)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    given = {name: value.numpy() for name, value in zip(names[0], values, strict=True)}
    return [torch.from_numpy(found) for found in session.run(None, given)]


def largest(found: Sequence[Any], expected: Sequence[Any]) -> float:
    return max(relative_error(*pair) for pair in zip(found, expected, strict=True))


def measure(file: Path) -> None:
    program = open_exported(read_exported(file))
    shapes = tuple((ROWS, *(tensor.shape or ())[1:]) for tensor in program.signature.inputs)
    inputs = {"random": trial_inputs(program.signature.inputs, shapes, torch.device("cpu"))}
    data = file.with_suffix(".npy")
    if data.is_file():
        inputs["data"] = [torch.from_numpy(np.load(data)[:ROWS])]
    quantised = file.with_stem(f"{file.stem}_int8")
    for kind, values in inputs.items():
        exact = outputs(program, values)
        with RoundedProducts():
            found = {"fp32": largest(outputs(program, values), exact)}
        for precision, dtype in DTYPES.items():
            found[precision] = largest(outputs(open_exported(read_exported(file), dtype), values), exact)
        if quantised.is_file():
            own = open_exported(read_exported(quantised))
            found["int8"] = largest(by_onnx_runtime(quantised, own, values), outputs(own, values))
        print(file.stem, kind, *(f"{name} {error:.2g}" for name, error in found.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how far rounding takes networks from themselves.")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE.pt2")
    for file in parser.parse_args().files:
        measure(file)


if __name__ == "__main__":
    main()
