"""Describes an ONNX session's inputs and outputs as clients see them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rocserve.backends.migraphx.compiling.graph import ONNX_DATATYPES
from rocserve.backends.onnx.model_file import ModelFile
from rocserve.backends.purpose import read_purpose
from rocserve.core.datatypes import DataType
from rocserve.core.errors import invalid_argument
from rocserve.core.model_config import InputConfig, ModelConfig, OutputConfig
from rocserve.core.requests import Signature, TensorSpec
from rocserve.load_check.dimension_names import names_disagree

DATATYPES = {
    **{f"tensor({name})": datatype for name, datatype in ONNX_DATATYPES.items()},
    "tensor(string)": DataType.BYTES,
}
"""ONNX Runtime's name of a tensor's type -> KServe datatype."""


def session_signature(session: Any, config: ModelConfig, file: ModelFile) -> Signature:
    """Return the session's signature, with the configuration's dims for tensors without a shape in the model. Inputs
    with a default in the file are optional. Raises ServeError (INVALID_ARGUMENT) if an input or output is not a tensor,
    or has no KServe datatype."""
    batches = config.max_batch_size > 0
    configured: tuple[InputConfig | OutputConfig, ...] = (*config.inputs, *config.outputs)
    declared = {one.name: ((-1,) if batches else ()) + one.model_dims for one in configured if not one.any_rank}

    def specs(kind: str, nodes: Iterable[Any]) -> tuple[TensorSpec, ...]:
        return tuple(_spec(kind, node, declared.get(node.name, ()), file) for node in nodes)

    inputs, outputs = specs("input", session.get_inputs()), specs("output", session.get_outputs())
    outputs = tuple(replace(spec, labels=file.labels.get(spec.name, ())) for spec in outputs)
    defaulted = _defaulted(session, declared)
    single = frozenset(node.name for node in defaulted if not _has_rows(node, session))
    # A configuration that batches can only offer inputs with a row for each row of the batch.
    optional = specs(
        "input", (node for node in defaulted if node.name in declared or not (batches and node.name in single))
    )
    batching = bool(inputs) and all(map(_is_open, (*inputs, *outputs)))
    return Signature(
        (*inputs, *optional),
        outputs,
        batching,
        frozenset(spec.name for spec in optional),
        purpose=read_purpose(session.get_modelmeta().custom_metadata_map),
        # A written max_batch_size declares that rows are the batch.
        dependent_rows=(_other_rows(session) or _single_text(single)) if batching and not batches else "",
    )


def _defaulted(session: Any, declared: Mapping[str, object]) -> Sequence[Any]:
    """Return the inputs with a default: all of them, or of weights only those that the configuration names."""
    nodes: Sequence[Any] = session.get_overridable_initializers()
    values = sum(math.prod(size for size in node.shape if isinstance(size, int)) for node in nodes)
    # A file with more values in its defaults keeps its weights as inputs, as ONNX required before IR version 4 and some
    # exporters still do.
    return [node for node in nodes if node.name in declared or values <= 1024]


def _has_rows(node: Any, session: Any) -> bool:
    """Return whether an input with a default has a row for each row of a batch: its rows have the inputs' name."""
    rows = next((given.shape[0] for given in session.get_inputs() if given.shape), None)
    return bool(isinstance(rows, str) and node.shape and node.shape[0] == rows)


def _is_open(spec: TensorSpec) -> bool:
    return spec.shape[:1] == (-1,) and not spec.any_rank


def _other_rows(session: Any) -> str:
    inputs, outputs = (
        {node.name: node.shape[0] if node.shape else None for node in nodes}
        for nodes in (session.get_inputs(), session.get_outputs())
    )
    named = names_disagree(inputs, outputs)
    return f"rows depend on each other: {named}" if named else ""


def _single_text(single: Iterable[str]) -> str:
    """Return the reason if there are optional inputs that a batch could have only once; "" = none."""
    if not (names := ", ".join(f"'{name}'" for name in sorted(single))):
        return ""
    return (
        f"input {names} has a default in the file, and requests may override it; max_batch_size in config.pbtxt"
        " batches requests and removes this input"
    )


def _spec(kind: str, node: Any, declared: tuple[int, ...], file: ModelFile) -> TensorSpec:
    datatype = DATATYPES.get(node.type)
    if datatype is None:
        reason = (
            "but only dense tensors can be served; export the model with tensors instead (a model of several"
            " classifiers: join their outputs, or export each by itself)"
        )
        if node.type.startswith("tensor("):
            known = ", ".join(DATATYPES)
            reason = f"which the KServe protocol does not have; supported types are {known}"
        raise invalid_argument(f"{kind} '{node.name}' has ONNX type {node.type}, {reason}")
    if node.shape:
        # A varying dimension is a name or None.
        shape = tuple(dim if isinstance(dim, int) and dim >= 0 else -1 for dim in node.shape)
        names = tuple(dim if isinstance(dim, str) else "" for dim in node.shape)
        return TensorSpec(node.name, datatype, shape, dimension_names=names if any(names) else ())
    # ONNX Runtime gives an empty list for a scalar, and for a tensor whose rank it does not know.
    if node.name in file.scalars and all(dim == 1 for dim in declared):
        return TensorSpec(node.name, datatype, ())
    return TensorSpec(node.name, datatype, declared or (-1,), any_rank=not declared)


def fixed_dimensions(
    inputs: Mapping[str, Sequence[Any]], config: ModelConfig, provider: str, batch_size: int
) -> Mapping[str, int]:
    """Return sizes for the named dimensions, from the configuration and the batch size (0 = none). A dimension in
    `inputs` is a number, a name, or None if it varies without a name. A name that would get two sizes is left out.
    Raises ServeError (INVALID_ARGUMENT) if the configuration leaves a varying dimension open."""
    declared = {entry.name: entry.model_dims for entry in config.inputs}
    batch = (batch_size,) if batch_size else ()
    sizes: dict[str, int] = {}
    differing: set[str] = set()
    for name, dims in inputs.items():
        known = (*batch, *declared.get(name, ()))
        for index, dim in enumerate(dims):
            if isinstance(dim, int) and dim >= 0:
                continue
            size = known[index] if index < len(known) else -1
            if size < 0:
                raise invalid_argument(
                    f"model '{config.name}': dimension {index} of input '{name}' may have any size ({dim or '?'}), but"
                    f" {provider} compiles each shape in advance; give all dims of the input in config.pbtxt, each as a"
                    " number"
                )
            if isinstance(dim, str) and dim and sizes.setdefault(dim, size) != size:
                differing.add(dim)
    return {name: size for name, size in sizes.items() if name not in differing}
