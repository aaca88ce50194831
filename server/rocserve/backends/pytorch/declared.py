"""TorchScript programs and AOTInductor packages: the configuration has to tell their inputs' datatypes and shapes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rocserve.backends.pytorch.program import Program, ProgramSignature, ProgramTensor, input_names, precision_of
from rocserve.core.errors import ServeError, invalid_argument, unavailable

_DEVICE = "AOTI_DEVICE_KEY"
"""In a package's metadata: the kind of device that it was compiled for."""


def open_script(path: Path, device: torch.device, dtype: torch.dtype | None, keys: Sequence[str]) -> Program:
    """
    Args:
        dtype: of the weights and the computation; None = the file's.
        keys: the names of the inputs in the configuration, for where `forward` takes a dict.

    Raises:
        ServeError: INVALID_ARGUMENT, PyTorch cannot read it, or it takes something else than tensors and strings.
    """
    try:
        module = torch.jit.load(path, map_location=device)
        if hasattr(module, "training"):  # A frozen one has no modes.
            module.eval()
        if dtype is not None:
            module.to(dtype)
        arguments = module.forward.schema.arguments[1:]
    except Exception as error:
        raise _unreadable(path, error) from error
    needed = [argument for argument in arguments if not argument.has_default_value() or _is_tensor(argument)]
    if len(needed) == 1 and str(needed[0].type) == "Dict[str, Tensor]":
        return Program(
            lambda values: module(dict(zip(keys, values, strict=True))),
            _told_by_configuration([ProgramTensor((key,)) for key in keys], precision_of(module.state_dict())),
        )
    for argument in needed:
        if not _is_tensor(argument) and str(argument.type) != "List[str]":
            raise invalid_argument(
                f"argument '{argument.name}' of forward in {path.name} is of type {argument.type}; what can be served"
                " are arguments of type Tensor or List[str], or a single one of type Dict[str, Tensor]"
            )
    return Program(
        lambda values: module(*values),
        _told_by_configuration(
            [ProgramTensor((argument.name, f"INPUT__{place}")) for place, argument in enumerate(needed)],
            precision_of(module.state_dict()),
            goes_by_order=True,
        ),
    )


def open_package(path: Path, device: torch.device) -> Program:
    """
    Raises:
        ServeError: INVALID_ARGUMENT, PyTorch cannot load it; UNAVAILABLE, it is compiled for another kind of device.
    """
    try:
        package = torch._inductor.aoti_load_package(
            str(path), device_index=-1 if device.index is None else device.index
        )
        compiled_for = package.loader.get_metadata().get(_DEVICE, device.type)
        in_spec = pytree.treespec_loads(package.loader.get_call_spec()[0])
    except Exception as error:
        raise _unreadable(path, error) from error
    if compiled_for != device.type:
        raise unavailable(
            f"{path.name} is compiled for PyTorch's device '{compiled_for}' and the instance is on '{device.type}';"
            " give the model instances there, or compile the program for this device"
        )

    def call(values: Sequence[Any]) -> Any:
        args, kwargs = pytree.tree_unflatten(list(values), in_spec)
        return package(*args, **kwargs)

    names = enumerate(input_names(in_spec))
    return Program(call, _told_by_configuration([ProgramTensor((f"INPUT__{place}", way)) for place, way in names]))


def _told_by_configuration(
    inputs: Sequence[ProgramTensor], precision: str = "", goes_by_order: bool = False
) -> ProgramSignature:
    # It may write into any of them.
    overwritten = frozenset(range(len(inputs)))
    return ProgramSignature(
        tuple(inputs), None, goes_by_order=goes_by_order, overwritten=overwritten, precision=precision
    )


def _is_tensor(argument: Any) -> bool:
    return bool(argument.type.kind() == "TensorType")


def _unreadable(path: Path, error: Exception) -> ServeError:
    return invalid_argument(f"PyTorch {torch.__version__} cannot read {path.name}: {error}")
