"""What an ONNX Runtime session says of its inputs and outputs, as a Signature."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from rocserve.backends.migraphx.model_files.graph import ONNX_DATATYPES
from rocserve.core.datatypes import DataType
from rocserve.core.errors import invalid_argument
from rocserve.core.model_config import InputConfig, ModelConfig, OutputConfig
from rocserve.core.requests import Signature, TensorSpec

_DATATYPES = {
    **{f"tensor({name})": datatype for name, datatype in ONNX_DATATYPES.items()},
    "tensor(string)": DataType.BYTES,
}


def session_signature(session: Any, config: ModelConfig) -> Signature:
    """The session's signature; the configuration's dims stand in for those that the model leaves out altogether.

    Raises:
        ServeError: INVALID_ARGUMENT; an input or output is no tensor, or of a type that KServe has no name for.
    """
    inputs = tuple(_specs("input", session.get_inputs(), _declared_shapes(config.inputs, config.max_batch_size)))
    outputs = tuple(_specs("output", session.get_outputs(), _declared_shapes(config.outputs, config.max_batch_size)))
    batching = bool(inputs) and all(spec.shape[:1] == (-1,) for spec in (*inputs, *outputs))
    return Signature(inputs, outputs, batching)


def _declared_shapes(tensors: Iterable[InputConfig | OutputConfig], max_batch_size: int) -> dict[str, tuple[int, ...]]:
    lead = (-1,) if max_batch_size > 0 else ()
    return {tensor.name: lead + (tensor.dims if tensor.reshape is None else tensor.reshape) for tensor in tensors}


def _specs(kind: str, nodes: Iterable[Any], declared: Mapping[str, tuple[int, ...]]) -> Iterable[TensorSpec]:
    for node in nodes:
        datatype = _DATATYPES.get(node.type)
        if datatype is None:
            raise invalid_argument(f"{kind} '{node.name}' has ONNX type {node.type}, {_reason(node.type)}")
        # A dimension is a number, or a name or None where it may vary. ONNX Runtime tells a tensor without a shape
        # and a scalar by the same empty list.
        shape = tuple(dim if isinstance(dim, int) and dim >= 0 else -1 for dim in node.shape)
        yield TensorSpec(node.name, datatype, shape or declared.get(node.name, ()))


def _reason(onnx_type: str) -> str:
    if onnx_type.startswith("tensor("):
        return f"which has no datatype in the KServe protocol; those that have are {', '.join(_DATATYPES)}"
    return (
        "but only dense tensors can be served; export the model with tensors instead (scikit-learn classifiers:"
        " option zipmap=False)"
    )


def has_single_rows(signature: Signature) -> bool:
    """Whether the model's file says 1 where the batch would be, in all that it takes and gives."""
    tensors = (*signature.inputs, *signature.outputs)
    return bool(signature.inputs) and all(spec.shape[:1] == (1,) for spec in tensors)


def with_open_batch(signature: Signature) -> Signature:
    """The same with any number of rows."""
    inputs, outputs = (
        tuple(replace(spec, shape=(-1, *spec.shape[1:])) for spec in specs)
        for specs in (signature.inputs, signature.outputs)
    )
    return replace(signature, inputs=inputs, outputs=outputs, supports_batching=True)
