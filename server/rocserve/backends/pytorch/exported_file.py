"""Reads files of torch.export, and imports the packages whose classes a program takes or returns."""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rocserve.core.errors import ServeError, invalid_argument, unavailable, unreadable
from rocserve.core.printable import without_colours

_CPU = torch.device("cpu")
_MODEL = "model"
"""The name that torch.export.save gives a program in its archive."""


def read_exported(path: Path, device: torch.device | None = _CPU) -> Any:
    """Read a program of torch.export onto the device; None = each part stays on the device that the file names. Raises
    ServeError: INVALID_ARGUMENT with PyTorch's reason if PyTorch cannot read the file, UNAVAILABLE as
    `import_classes`."""
    # It registers the operators of quantised programs, which cannot be read without it.
    importlib.import_module("torch.ao.quantization.fx._decomposed")
    try:
        exported = _load(path)
    except Exception as error:
        if not (import_operators(path.name, str(error)) or import_classes(path.name, _specs(path))):
            raise read_fault(path, error) from error
        try:
            exported = _load(path)
        except Exception as other:
            raise read_fault(path, other) from other
    if in_training := training_operators(exported):
        logging.getLogger(__name__).warning(
            "%s was exported in training mode (it computes %s as in training): its answers may be random, or depend on"
            " the other requests of a batch; export it after model.eval()",
            path.name, " and ".join(in_training),
        )  # fmt: skip
    if device is None or devices_of(exported) <= {str(device)}:
        return exported
    from torch.export.passes import move_to_device_pass

    return move_to_device_pass(exported, device)


def training_operators(exported: Any) -> list[str]:
    """Return the names of the operators that compute as in training."""
    return sorted({operator_name(node).removeprefix("aten::") for node in exported.graph.nodes if is_in_training(node)})


def operator_name(node: Any) -> str:
    """Return the name of a node's operator, such as "aten::gt"; "" = PyTorch does not have the operator."""
    return str(node.target._schema.name) if isinstance(node.target, torch._ops.OpOverload) else ""


def is_in_training(node: Any) -> bool:
    """Return whether a node's operator computes as in training, and otherwise for inference."""
    name = operator_name(node).removeprefix("aten::")
    # An export writes it only in training mode.
    always = ("_native_batch_norm_legit_functional",)
    # Operators that differ between training and inference, by an argument or always.
    operators = (
        "dropout", "feature_dropout", "alpha_dropout", "native_dropout", "batch_norm", "native_batch_norm",
        "_native_batch_norm_legit", *always,
    )  # fmt: skip
    return name in operators and (name in always or training_switch(node) is True)


def training_switch(node: Any) -> object:
    """Return the argument of a node that tells training from inference; None = its operator has none."""
    names = (argument.name for argument in node.target._schema.arguments)
    values = dict(zip(names, node.args, strict=False)) | node.kwargs
    return values.get("train", values.get("training"))


def devices_of(exported: Any) -> set[str]:
    """Return the devices of all tensors in a torch.export program."""
    tensors = [*exported.state_dict.values(), *exported.constants.values()]
    tensors += [node.meta.get("val") for node in exported.graph.nodes]
    return {str(tensor.device) for tensor in tensors if isinstance(tensor, torch.Tensor)}


def import_classes(file: str, specs: Iterable[str]) -> bool:
    """Import the modules of the classes that a program takes or returns, which register them with PyTorch. `specs`:
    PyTorch's descriptions of its arguments and results. Return whether there were any to import. Raises ServeError
    (UNAVAILABLE) if a module is missing, or does not register its class."""
    # In such a description, a class with its module.
    found = {
        (module.rstrip("."), name)
        for spec in specs
        for module, name in re.findall(r'"type": *"((?:[A-Za-z_]\w*\.)+)([A-Za-z_]\w*)"', spec)
    }
    missing = sorted(pair for pair in found if ".".join(pair) not in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE)
    for module, name in missing:
        package = module.partition(".")[0]
        # Models of these packages return a class of theirs, or a tuple with return_dict=False.
        has_option = package in {"transformers", "diffusers"}
        what = f"{file} takes or returns {name}, a class of the package '{package}'"
        remedy = "return_dict=False" if has_option else "a forward that takes and returns tensors, tuples and dicts"
        try:
            importlib.import_module(module)
        except Exception as error:
            install = f"install {package} where rocserve is"
            if has_option:
                install += f" (pip install {package})"
            raise unavailable(
                f"{what}, which cannot be imported here ({error}); {install}, or export the program with {remedy}"
            ) from error
        if f"{module}.{name}" not in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE:
            if has_option:
                remedy = "return_dict=False and use_cache=False"
            raise unavailable(
                f"{what}, which is imported, but does not register the class with PyTorch; export the program with"
                f" {remedy}"
            )
    return bool(missing)


def import_operators(file: str, reason: str) -> bool:
    """Import the package with the name of an operator's namespace (torchvision), if `reason` says that PyTorch lacks
    the operator. Return whether there was one to import. Raises ServeError (UNAVAILABLE) if it cannot be imported."""
    found = re.search(r"(?:target='torch\.ops\.|Unknown builtin op: )(\w+)(?:\.|::)(\w+)", reason)
    if found is None or hasattr(getattr(torch.ops, found[1]), found[2]):
        return False
    try:
        importlib.import_module(found[1])
    except Exception as error:
        raise unavailable(
            f"{file} calls the operator {found[1]}::{found[2]}, which PyTorch {torch.__version__} does not have, and no"
            f" package '{found[1]}' that would register it can be imported here ({error}); install that package where"
            " rocserve is, or export the program without the operator"
        ) from error
    return True


def only_name(names: Iterable[str], what: str) -> str:
    """Return the name under which an archive holds its program. Raises ServeError (INVALID_ARGUMENT) if it holds
    several, of which none has PyTorch's default name."""
    known = sorted(set(names))
    if len(known) > 1 and _MODEL not in known:
        raise invalid_argument(
            f"it holds {what} {', '.join(known)}, expected one, or one named '{_MODEL}'; save each in a separate file"
        )
    return _MODEL if _MODEL in known or not known else known[0]


def read_fault(path: Path, error: Exception) -> ServeError:
    """Return the error for a file that PyTorch cannot read."""
    prefix = f"PyTorch {torch.__version__} cannot read {path.name}: "
    if found := re.search(r"Unsupported (?:global: GLOBAL|class) ([\w.]+)", str(error)):
        # PyTorch's own text advises to read the file without this check.
        return invalid_argument(
            f"{prefix}it holds objects of {found[1]}, and only plain tensors are read, because other objects may run"
            " code. Tensor classes such as torchao's become plain tensors and operators by `exported ="
            f" exported.run_decompositions()` before torch.export.save(exported, '{path.name}')"
        )
    text = f"{prefix}{without_colours(str(error))}"
    return unreadable(text, error) if isinstance(error, OSError) else invalid_argument(text)


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable during a block, for a setting that PyTorch takes in no other way."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _load(path: Path) -> Any:
    logger, causes = logging.getLogger(torch.export.__name__), list[Exception]()

    def is_other(record: logging.LogRecord) -> bool:
        """Keep the exception that torch.export.load logs, and drop the record: the exception that it raises does not
        have the reason."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, Exception):
            causes.append(error)
        return not isinstance(error, Exception)

    level, disabled = logger.level, logging.root.manager.disable
    logger.addFilter(is_other)
    # A filter sees only records of a level that is not switched off.
    logger.setLevel(logging.WARNING)
    logging.disable(logging.NOTSET)
    try:
        # PyTorch then reads pickles only as tensors, without a fallback to pickles that call functions.
        with environment("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1"):
            name = _program_name(path)
            if name == _MODEL:
                return torch.export.load(path)
            from torch.export.pt2_archive._package import load_pt2

            return load_pt2(path).exported_programs[name]
    except Exception as error:
        raise (causes[-1] if causes else error) from None
    finally:
        logging.disable(disabled)
        logger.setLevel(level)
        logger.removeFilter(is_other)


def _program_name(path: Path) -> str:
    with zipfile.ZipFile(path) as archive:
        inner = [name.partition("/")[2] for name in archive.namelist()]
    programs = (Path(name).stem for name in inner if name.startswith("models/") and name.endswith(".json"))
    return only_name(programs, "the programs")


def _specs(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        texts = [archive.read(name).decode(errors="replace") for name in archive.namelist() if _is_program(name)]
    # A description of a program's arguments or results: JSON in a string of the file's JSON.
    described = re.compile(r'"(?:in_spec|out_spec)": *("(?:[^"\\]|\\.)*")')
    return [json.loads(spec) for text in texts for spec in described.findall(text)]


def _is_program(member: str) -> bool:
    inner = member.partition("/")[2]
    return member == "serialized_exported_program.json" or (inner.startswith("models/") and inner.endswith(".json"))
