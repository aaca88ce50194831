"""Finds whether a package of AOTInductor takes what the configuration says. It would read inputs of other shapes or
datatypes beyond their ends, and give what lies there."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from rocserve.backends.pytorch.datatypes import torch_dtype
from rocserve.core.datatypes import DataType
from rocserve.core.errors import invalid_argument
from rocserve.core.requests import TensorSpec

_CHECKS = "AOTI_RUNTIME_CHECK_INPUTS"
"""Has packages that are called first while it is set compare their inputs with what they were compiled for. They serve
without: that refuses a single row, too, which they take."""
_UNMATCHED = re.compile(r"input_handles\[(\d+)\]: unmatched (.*)")
_TOO_SMALL = re.compile(r"input_handles\[(\d+)\]: dim value is too small at (\d+), expected it to be >= (\d+)")
_OPEN_SIZES = (2, 3)
"""Tried for each that varies: no size that is fixed in the package is both."""


def check_package(open_package: Callable[[], Callable[..., Any]], specs: Sequence[TensorSpec], device: Any) -> None:
    """`open_package`: gives what runs a copy of it, on inputs on the device. Raises: ServeError: INVALID_ARGUMENT, it
    takes other datatypes or sizes."""
    for spec in specs:
        if spec.datatype is DataType.BYTES:
            raise invalid_argument(f"input '{spec.name}' is of strings in config.pbtxt, and packages take tensors")
    with _checks():
        call = open_package()
        for size in _OPEN_SIZES:
            _try(call, specs, device, size)


def _try(call: Callable[..., Any], specs: Sequence[TensorSpec], device: Any, open_size: int) -> None:
    shapes = [[open_size if size == -1 else size for size in spec.shape] for spec in specs]
    while True:
        inputs = [
            torch.zeros(shape, dtype=torch_dtype(spec.datatype), device=device)
            for spec, shape in zip(specs, shapes, strict=True)
        ]
        try:
            call(inputs)
        except Exception as error:  # Most of all the program's own, of zeros.
            small = _TOO_SMALL.search(str(error))
            if small is not None:
                place, dimension, least = map(int, small.groups())
                shapes[place][dimension] = least + open_size
                continue
            unmatched = _UNMATCHED.search(str(error))
            if unmatched is not None:
                spec = specs[int(unmatched[1])]
                raise invalid_argument(
                    f"input '{spec.name}' is {spec.datatype.value} {list(spec.shape)} in config.pbtxt, and the package"
                    f" was compiled for another ({unmatched[2].strip()}, when it was tried with"
                    f" {shapes[int(unmatched[1])]})"
                ) from None
        return


@contextmanager
def _checks() -> Iterator[None]:
    os.environ[_CHECKS] = "1"
    try:
        yield
    finally:
        del os.environ[_CHECKS]
