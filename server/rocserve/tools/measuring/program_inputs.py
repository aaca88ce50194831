"""What a measured run of a compiled program takes."""

from __future__ import annotations

from rocserve.backends.migraphx.binding.interface import NUMPY_DTYPES, DimensionRange, ProgramTensor
from rocserve.core.errors import invalid_argument
from rocserve.tools.measuring.messages import MeasuredInput


def program_input(tensor: ProgramTensor, varying: int | None = None) -> MeasuredInput:
    """An input of a program. `varying`: the size of a dimension that varies; None = as large as it may be.

    Raises:
        ServeError: INVALID_ARGUMENT, arrays cannot hold its datatype.
    """
    dtype = NUMPY_DTYPES.get(tensor.datatype)
    if dtype is None:
        raise invalid_argument(f"input '{tensor.name}' is of MIGraphX's type {tensor.datatype}, which no array holds")
    shape = tuple(
        (dim.most if varying is None else varying) if isinstance(dim, DimensionRange) else dim for dim in tensor.shape
    )
    return MeasuredInput(tensor.name, dtype.name, shape)
