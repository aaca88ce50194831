"""Successful requests: all datatypes, shapes, optional inputs, chosen outputs, versions, ids, ensembles."""

from __future__ import annotations

import numpy as np
import pytest
from support.parity.exchange import Call, Exchange
from support.parity.inference import Input, Output, infer, raw_input
from support.parity.models import DATATYPES
from support.parity.pair import Pair
from tritonclient.grpc import service_pb2 as pb

_DTYPES = {
    "BOOL": "bool",
    "UINT8": "uint8",
    "UINT16": "uint16",
    "UINT32": "uint32",
    "UINT64": "uint64",
    "INT8": "int8",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "FP16": "float16",
    "FP32": "float32",
    "FP64": "float64",
}
_TYPED_FIELDS = {
    "BOOL": "bool_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}
_EXTREMES: dict[str, list[object]] = {
    "BOOL": [True, False, True, False],
    "UINT8": [0, 255, 7, 128],
    "UINT16": [0, 65535, 7, 256],
    "UINT32": [0, 2**32 - 1, 7, 256],
    "UINT64": [0, 2**64 - 1, 7, 256],
    "INT8": [-128, 127, 0, -1],
    "INT16": [-(2**15), 2**15 - 1, 0, -1],
    "INT32": [-(2**31), 2**31 - 1, 0, -1],
    "INT64": [-(2**63), 2**63 - 1, 0, -1],
    "FP16": [-1.5, 65504.0, float("inf"), float("nan")],
    "FP32": [-1.5, 3.4e38, float("inf"), float("nan")],
    "FP64": [-1.5, 1.7e308, float("-inf"), float("nan")],
}


def every_type(datatype: str, shape: list[int]) -> Input:
    """Four values of each datatype in this shape, raw."""
    name = f"INPUT_{datatype}"
    if datatype == "BF16":
        return Input(name, "BF16", shape, bytes(range(8)))
    if datatype == "BYTES":
        return raw_input(name, np.array([b"one", b"", b"\x00\xff", "ä".encode()], object).reshape(shape), "object")
    return raw_input(name, np.array(_EXTREMES[datatype], _DTYPES[datatype]).reshape(shape), _DTYPES[datatype])


def typed(datatype: str, shape: list[int]) -> Input:
    """The same four values in the typed contents."""
    values = [b"one", b"", b"\x00\xff", b"x"] if datatype == "BYTES" else _EXTREMES[datatype]
    return Input(f"INPUT_{datatype}", datatype, shape, contents={_TYPED_FIELDS.get(datatype, "bytes_contents"): values})


def add_sub(model: str = "add_sub", rows: int = 2, columns: int = 4, **more: object) -> pb.ModelInferRequest:
    first = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)
    return infer(model, raw_input("INPUT0", first), raw_input("INPUT1", first * 3), **more)


def exchange(name: str, request: pb.ModelInferRequest) -> Exchange:
    return Exchange(name, [Call("ModelInfer", request)])


def through_ensemble(name: str, request: pb.ModelInferRequest) -> Exchange:
    return Exchange(name, [Call("ModelInfer", request)], ordered=False)


FP32 = raw_input("INPUT_FP32", [[1.5, -2.5]], "float32")
DATATYPE_CASES = [
    *(exchange(f"raw {name} in rows", infer("types", every_type(name, [2, 2]))) for name in DATATYPES),
    *(exchange(f"raw {name} whole", infer("types_whole", every_type(name, [4]))) for name in DATATYPES),
    *(
        exchange(f"typed {name}", infer("types", typed(name, [2, 2])))
        for name in DATATYPES
        if name in _TYPED_FIELDS or name == "BYTES"
    ),
    *(
        exchange(f"no elements of {name}", infer("types_whole", Input(f"INPUT_{name}", name, [0], b"")))
        for name in DATATYPES
    ),
]
SHAPE_CASES = [
    exchange("one row", add_sub(rows=1)),
    exchange("a full batch", add_sub(rows=8)),
    exchange("no batch dimension", add_sub("add_sub_whole", 2, 4)),
    exchange(
        "variable first dimension",
        infer("add_sub_any", *(raw_input(f"INPUT{index}", np.full((2, 3, 2), index + 1)) for index in (0, 1))),
    ),
    exchange(
        "variable dimension of zero",
        infer("add_sub_any", *(raw_input(f"INPUT{index}", np.zeros((2, 0, 2))) for index in (0, 1))),
    ),
    exchange("zero columns in a batch", infer("types", raw_input("INPUT_FP32", np.zeros((3, 0)), "float32"))),
    exchange(
        "reshaped",
        infer("reshaped", raw_input("INPUT_A", [[1, 2, 3, 4]], "float32"), raw_input("INPUT_B", [[5]], "float32")),
    ),
    exchange(
        "reshaped with variable dimensions",
        infer(
            "reshaped",
            raw_input("INPUT_A", [[1, 2, 3, 4]], "float32"),
            raw_input("INPUT_B", [[5]], "float32"),
            raw_input("INPUT_C", np.arange(12).reshape(1, 3, 2, 2), "float32"),
        ),
    ),
    exchange(
        "inputs in another order",
        infer("add_sub", raw_input("INPUT1", [[1, 2, 3, 4]]), raw_input("INPUT0", [[9, 8, 7, 6]])),
    ),
]
OPTIONAL_CASES = [
    exchange("first optional input", infer("optional", raw_input("INPUT0", [[1, 2, 3, 4]]))),
    exchange("second optional input", infer("optional", raw_input("INPUT1", [[1, 2, 3, 4]]))),
    exchange("both optional inputs", add_sub("optional")),
    exchange("optional input of a chain's member", infer("labelled", raw_input("IN", [[1, 2]], "float32"))),
]
OUTPUT_CASES = [
    exchange("no outputs named", add_sub()),
    exchange("first output", add_sub(outputs=["OUTPUT0"])),
    exchange("second output", add_sub(outputs=["OUTPUT1"])),
    exchange("outputs in another order", add_sub(outputs=["OUTPUT1", "OUTPUT0"])),
    exchange("an output twice", add_sub(outputs=["OUTPUT0", "OUTPUT0"])),
    exchange("an output twice and another", add_sub(outputs=["OUTPUT1", "OUTPUT0", "OUTPUT1"])),
    exchange("an output that the model leaves out", infer("types", FP32, outputs=["OUTPUT_INT8"])),
    exchange(
        "an output that the model leaves out and one that it gives",
        infer("types", FP32, outputs=["OUTPUT_INT8", "OUTPUT_FP32"]),
    ),
    exchange("output with an unknown parameter", add_sub(outputs=[Output("OUTPUT0", {"colour": "red"})])),
    exchange("output with binary_data", add_sub(outputs=[Output("OUTPUT0", {"binary_data": True})])),
]
VERSION_CASES = [
    *(
        exchange(f"version {version!r} of {model}", infer(model, version=version))
        for model, versions in (("versions", ("", "1", "3", "03", "+3")), ("latest", ("", "7", "10", "010")))
        for version in versions
    )
]
SEEN_CASES = [
    exchange("no inputs", infer("seen")),
    exchange("an id", infer("seen", request_id="request 1")),
    exchange("an id of many letters", infer("seen", request_id="ä" * 500)),
    exchange("an id with a zero byte", infer("seen", request_id="a\0b")),
    exchange("extra raw contents", add_sub(further_raw=[b"more"])),
    exchange("input with an unknown parameter", infer("seen", raw_input("IN", [1], "float32", colour="red"))),
]
ENSEMBLE_CASES = [
    through_ensemble("chain", add_sub("chain")),
    through_ensemble("chain of a full batch", add_sub("chain", 8)),
    through_ensemble("chain with one output", add_sub("chain", outputs=["OUTPUT1"])),
    through_ensemble("chain with an id", add_sub("chain", request_id="through the chain")),
    through_ensemble("chain by version", add_sub("chain", version="1")),
    through_ensemble(
        "chain that tells what its member sees",
        infer("seen_chain", raw_input("IN", [1, 2], "float32"), request_id="seven", parameters={"colour": "red"}),
    ),
]
FAULTLESS_CASES = [
    exchange(f"model that answers oddly: {mode}", infer("faults", raw_input("MODE", [mode], "object")))
    for mode in ("right", "other_type", "other_shape", "no_outputs", "other_name", "twice")
]
BYTES_CASES = [
    exchange("long element", infer("types_whole", raw_input("INPUT_BYTES", [b"x" * 100_000], "object"))),
    exchange(
        "many elements",
        infer("types_whole", raw_input("INPUT_BYTES", [str(index).encode() for index in range(1000)], "object")),
    ),
    exchange("text of unicode", infer("types_whole", raw_input("INPUT_BYTES", ["grün".encode()], "object"))),
]


@pytest.mark.parametrize(
    "exchange",
    [
        *DATATYPE_CASES,
        *SHAPE_CASES,
        *OPTIONAL_CASES,
        *OUTPUT_CASES,
        *VERSION_CASES,
        *SEEN_CASES,
        *ENSEMBLE_CASES,
        *FAULTLESS_CASES,
        *BYTES_CASES,
    ],
    ids=lambda exchange: exchange.name,
)
def test_inference(pair: Pair, exchange: Exchange) -> None:
    pair.compare(exchange)
