"""Refused inference requests: wrong names, shapes, types, sizes, versions, parameters, and invalid messages."""

from __future__ import annotations

import numpy as np
import pytest
from support.parity.exchange import Call, Exchange, serialised
from support.parity.inference import Input, infer, raw_input
from support.parity.pair import Pair
from tritonclient.grpc import service_pb2 as pb

ROW = [[1, 2, 3, 4]]
FIRST, SECOND = raw_input("INPUT0", ROW), raw_input("INPUT1", ROW)
MODE = raw_input("MODE", [b"right"], "object")


def exchange(name: str, request: pb.ModelInferRequest | bytes) -> Exchange:
    return Exchange(name, [Call("ModelInfer", request)])


def int32(name: str, shape: list[int], count: int | None = None) -> Input:
    """An INT32 input of this shape with `count` elements."""
    return Input(name, "INT32", shape, bytes(4 * (int(np.prod(shape)) if count is None else count)))


def both(shape: list[int], model: str = "add_sub") -> pb.ModelInferRequest:
    return infer(model, int32("INPUT0", shape), int32("INPUT1", shape))


NAME_CASES = [
    exchange("empty request", infer("")),
    exchange("no model name", infer("", FIRST, SECOND)),
    exchange("unknown model", infer("missing", FIRST, SECOND)),
    exchange("unknown model with a version", infer("missing", FIRST, SECOND, version="1")),
    exchange("unknown model with no number as version", infer("missing", version="x")),
    exchange("model name in capitals", infer("ADD_SUB", FIRST, SECOND)),
    exchange("model name with a slash", infer("../add_sub", FIRST, SECOND)),
    exchange("model name with a zero byte", infer("add\0sub", FIRST, SECOND)),
    *(
        exchange(f"version {version!r}", infer("versions", version=version))
        for version in (
            "2",
            "4",
            "0",
            "-1",
            "-0",
            " 3",
            "3 ",
            "3.0",
            "1e1",
            "abc",
            "0x3",
            "9" * 30,
            "9223372036854775807",
            "٣",
        )
    ),
    exchange("unknown version of an ensemble", infer("chain", FIRST, SECOND, version="2")),
]
INPUT_CASES = [
    exchange("no inputs", infer("add_sub")),
    exchange("one input of two", infer("add_sub", FIRST)),
    exchange("the other input of two", infer("add_sub", SECOND)),
    exchange("one input of two with an id", infer("add_sub", FIRST, request_id="mine")),
    exchange("one input too many", infer("add_sub", FIRST, SECOND, raw_input("INPUT2", ROW))),
    exchange("an unknown input", infer("add_sub", FIRST, raw_input("OTHER", ROW))),
    exchange("two unknown inputs", infer("add_sub", raw_input("A", ROW), raw_input("B", ROW))),
    exchange("only an unknown input", infer("add_sub", raw_input("OTHER", ROW))),
    exchange("an input without a name", infer("add_sub", FIRST, raw_input("", ROW))),
    exchange("an input twice", infer("add_sub", FIRST, FIRST)),
    exchange("an input twice and the other", infer("add_sub", FIRST, SECOND, FIRST)),
    exchange("an input twice with an id", infer("add_sub", FIRST, FIRST, request_id="mine")),
    exchange("no optional input", infer("optional")),
    exchange("an unknown optional input", infer("optional", raw_input("INPUT2", ROW))),
    exchange("too many optional inputs", infer("optional", FIRST, SECOND, raw_input("INPUT2", ROW))),
    exchange(
        "required inputs missing beside an optional one",
        infer("reshaped", raw_input("INPUT_C", np.zeros((1, 3, 2, 2)), "float32")),
    ),
    exchange(
        "one required input missing beside optional ones", infer("reshaped", raw_input("INPUT_A", ROW, "float32"))
    ),
    exchange("input of a chain missing", infer("chain", FIRST)),
    exchange("unknown input of a chain", infer("chain", FIRST, raw_input("OTHER", ROW))),
]
SHAPE_CASES = [
    exchange("no batch dimension", both([4])),
    exchange("no dimensions", both([])),
    exchange("no dimensions for a model without batches", both([], "add_sub_whole")),
    exchange("too many dimensions", both([1, 1, 4])),
    exchange("too few columns", both([1, 3])),
    exchange("too many columns", both([1, 5])),
    exchange("batch too big", both([9, 4])),
    exchange("batch much too big", both([1000, 4])),
    exchange("batch of zero", both([0, 4])),
    exchange("batch below zero", infer("add_sub", int32("INPUT0", [-1, 4], 4), int32("INPUT1", [-1, 4], 4))),
    exchange("dimension below zero", infer("add_sub", int32("INPUT0", [1, -4], 4), int32("INPUT1", [1, -4], 4))),
    exchange("unequal batches", infer("add_sub", int32("INPUT0", [1, 4]), int32("INPUT1", [2, 4]))),
    exchange("one wrong shape", infer("add_sub", FIRST, int32("INPUT1", [1, 2]))),
    exchange("one wrong shape with an id", infer("add_sub", FIRST, int32("INPUT1", [1, 2]), request_id="mine")),
    exchange("wrong shape for a model without batches", both([4, 2], "add_sub_whole")),
    exchange("batch for a model without batches", both([1, 2, 4], "add_sub_whole")),
    exchange("zero rows for a model without batches", both([0, 4], "add_sub_whole")),
    exchange(
        "variable dimension below zero",
        infer("add_sub_any", int32("INPUT0", [1, -1, 2], 2), int32("INPUT1", [1, -1, 2], 2)),
    ),
    exchange("fixed dimension wrong beside a variable one", both([1, 3, 3], "add_sub_any")),
    exchange(
        "unequal variable dimensions", infer("add_sub_any", int32("INPUT0", [1, 3, 2]), int32("INPUT1", [1, 2, 2]))
    ),
    exchange(
        "shape of the model in place of the request's",
        infer("reshaped", raw_input("INPUT_A", [[[1, 2], [3, 4]]], "float32"), raw_input("INPUT_B", [[5]], "float32")),
    ),
    exchange(
        "no dimension where the model has none",
        infer("reshaped", raw_input("INPUT_A", ROW, "float32"), raw_input("INPUT_B", [5], "float32")),
    ),
    exchange("wrong shape in a chain", both([1, 3], "chain")),
    exchange("batch too big for a chain", both([9, 4], "chain")),
    exchange("huge shape", infer("types_whole", Input("INPUT_FP32", "FP32", [2**40], b"1234"))),
    exchange(
        "shape that overflows",
        infer("add_sub_any", *(Input(f"INPUT{index}", "INT32", [1, 2**62, 2], b"1234") for index in (0, 1))),
    ),
]
TYPE_CASES = [
    exchange("wrong datatype", infer("add_sub", FIRST, raw_input("INPUT1", ROW, "float32"))),
    exchange(
        "wrong datatype with an id", infer("add_sub", FIRST, raw_input("INPUT1", ROW, "float32"), request_id="mine")
    ),
    exchange("datatype of equal size", infer("add_sub", raw_input("INPUT0", ROW, "uint32"), SECOND)),
    exchange("no datatype", infer("add_sub", FIRST, Input("INPUT1", "", [1, 4], bytes(16)))),
    exchange("unknown datatype", infer("add_sub", FIRST, Input("INPUT1", "INT33", [1, 4], bytes(16)))),
    exchange("datatype in small letters", infer("add_sub", FIRST, Input("INPUT1", "int32", [1, 4], bytes(16)))),
    exchange(
        "datatype as in a configuration", infer("add_sub", FIRST, Input("INPUT1", "TYPE_INT32", [1, 4], bytes(16)))
    ),
    exchange("STRING in place of BYTES", infer("faults", Input("MODE", "STRING", [1], MODE.raw))),
    exchange("wrong datatype in a chain", infer("chain", FIRST, raw_input("INPUT1", ROW, "float32"))),
    exchange("wrong datatype and wrong shape", infer("add_sub", FIRST, raw_input("INPUT1", [[1]], "float32"))),
    exchange("wrong datatype and wrong size", infer("add_sub", FIRST, Input("INPUT1", "FP32", [1, 4], b"12"))),
]
SIZE_CASES = [
    exchange("too few bytes", infer("add_sub", FIRST, int32("INPUT1", [1, 4], 3))),
    exchange("too many bytes", infer("add_sub", FIRST, int32("INPUT1", [1, 4], 5))),
    exchange("too few bytes with an id", infer("add_sub", FIRST, int32("INPUT1", [1, 4], 3), request_id="mine")),
    exchange("no bytes", infer("add_sub", FIRST, int32("INPUT1", [1, 4], 0))),
    exchange("bytes that make no element", infer("add_sub", FIRST, Input("INPUT1", "INT32", [1, 4], b"123"))),
    exchange("bytes for no elements", infer("types_whole", Input("INPUT_FP32", "FP32", [0], b"1234"))),
    exchange("too few bytes for a chain", infer("chain", FIRST, int32("INPUT1", [1, 4], 3))),
    exchange("raw contents missing", infer("add_sub", FIRST, Input("INPUT1", "INT32", [1, 4]))),
    exchange(
        "all raw contents missing", infer("add_sub", Input("INPUT0", "INT32", [1, 4]), Input("INPUT1", "INT32", [1, 4]))
    ),
    exchange("too few elements of BYTES", infer("types_whole", Input("INPUT_BYTES", "BYTES", [2], b"\1\0\0\0a"))),
    exchange(
        "too many elements of BYTES", infer("types_whole", Input("INPUT_BYTES", "BYTES", [1], b"\1\0\0\0a\1\0\0\0b"))
    ),
    exchange("no elements of BYTES", infer("types_whole", Input("INPUT_BYTES", "BYTES", [1], b""))),
    exchange(
        "element of BYTES that is cut off", infer("types_whole", Input("INPUT_BYTES", "BYTES", [1], b"\4\0\0\0abc"))
    ),
    exchange("length of BYTES that is cut off", infer("types_whole", Input("INPUT_BYTES", "BYTES", [1], b"\4\0\0"))),
    exchange(
        "length of BYTES that is huge", infer("types_whole", Input("INPUT_BYTES", "BYTES", [1], b"\xff\xff\xff\xffabc"))
    ),
    exchange("element of BYTES and a rest", infer("types_whole", Input("INPUT_BYTES", "BYTES", [1], b"\1\0\0\0a\1"))),
    exchange(
        "BYTES without an element but with data", infer("types_whole", Input("INPUT_BYTES", "BYTES", [0], b"\1\0\0\0a"))
    ),
    exchange(
        "BYTES elements missing, with an id",
        infer("types_whole", Input("INPUT_BYTES", "BYTES", [2], b"\1\0\0\0a"), request_id="mine"),
    ),
]


def typed(datatype: str, shape: list[int], name: str | None = None, **contents: list[object]) -> Input:
    return Input(name or f"INPUT_{datatype}", datatype, shape, contents=contents)


CONTENTS_CASES = [
    exchange(
        "contents beside raw contents",
        infer("add_sub", FIRST, Input("INPUT1", "INT32", [1, 4], contents={"int_contents": [1, 2, 3, 4]})),
    ),
    exchange(
        "contents and its own raw contents",
        infer("types_whole", Input("INPUT_INT32", "INT32", [1], b"1234", {"int_contents": [1]})),
    ),
    exchange("wrong field for INT32", infer("types_whole", typed("INT32", [1], fp32_contents=[1.0]))),
    exchange("wrong field for FP32", infer("types_whole", typed("FP32", [1], fp64_contents=[1.0]))),
    exchange("wrong field for FP64", infer("types_whole", typed("FP64", [1], fp32_contents=[1.0]))),
    exchange("wrong field for INT64", infer("types_whole", typed("INT64", [1], int_contents=[1]))),
    exchange("wrong field for UINT8", infer("types_whole", typed("UINT8", [1], int_contents=[1]))),
    exchange("wrong field for UINT64", infer("types_whole", typed("UINT64", [1], uint_contents=[1]))),
    exchange("wrong field for BOOL", infer("types_whole", typed("BOOL", [1], int_contents=[1]))),
    exchange("wrong field for BYTES", infer("types_whole", typed("BYTES", [1], int_contents=[1]))),
    exchange("typed contents for FP16", infer("types_whole", typed("FP16", [1], fp32_contents=[1.0]))),
    exchange("typed contents for BF16", infer("types_whole", typed("BF16", [1], fp32_contents=[1.0]))),
    exchange("two fields", infer("types_whole", typed("INT32", [1], int_contents=[1], fp32_contents=[1.0]))),
    exchange("too few typed values", infer("types_whole", typed("INT32", [2], int_contents=[1]))),
    exchange("too many typed values", infer("types_whole", typed("INT32", [1], int_contents=[1, 2]))),
    exchange("too few typed BYTES", infer("types_whole", typed("BYTES", [2], bytes_contents=[b"a"]))),
    exchange("too many typed BYTES", infer("types_whole", typed("BYTES", [1], bytes_contents=[b"a", b"b"]))),
    exchange("value above INT8", infer("types_whole", typed("INT8", [2], int_contents=[300, -300]))),
    exchange("value above UINT16", infer("types_whole", typed("UINT16", [2], uint_contents=[70000, 1]))),
    exchange("empty typed contents", infer("types_whole", typed("INT32", [1]))),
    exchange(
        "typed contents of an unknown datatype",
        infer("types_whole", typed("INT33", [1], "INPUT_INT32", int_contents=[1])),
    ),
]
OUTPUT_CASES = [
    exchange("unknown output", infer("add_sub", FIRST, SECOND, outputs=["NOPE"])),
    exchange("unknown output beside a right one", infer("add_sub", FIRST, SECOND, outputs=["OUTPUT0", "NOPE"])),
    exchange("output without a name", infer("add_sub", FIRST, SECOND, outputs=[""])),
    exchange("input's name as output", infer("add_sub", FIRST, SECOND, outputs=["INPUT0"])),
    exchange("unknown output of a chain", infer("chain", FIRST, SECOND, outputs=["sum"])),
    exchange("unknown output and a missing input", infer("add_sub", FIRST, outputs=["NOPE"])),
    exchange("unknown output with an id", infer("add_sub", FIRST, SECOND, outputs=["NOPE"], request_id="mine")),
]
FAULT_CASES = [
    *(
        exchange(f"model that {what}", infer("faults", raw_input("MODE", [mode], "object")))
        for what, mode in (
            ("answers with an error", "error"),
            ("answers with NOT_FOUND", "not_found"),
            ("answers with UNAVAILABLE", "unavailable"),
            ("answers with outputs and an error", "both"),
            ("raises", "raise"),
            ("answers with None", "none"),
            ("answers too little", "few"),
            ("answers too much", "many"),
            ("answers with something else", "foreign"),
        )
    ),
    *(
        exchange(f"member that {what}", infer("faulty_chain", raw_input("MODE", [mode], "object")))
        for what, mode in (
            ("answers with an error", "error"),
            ("answers with NOT_FOUND", "not_found"),
            ("gives no outputs", "no_outputs"),
        )
    ),
    exchange("decoupled model by ModelInfer", infer("repeat", raw_input("IN", [1]))),
    exchange("wrong input of a decoupled model by ModelInfer", infer("repeat", raw_input("IN", [1], "float32"))),
]
_RIGHT = serialised(infer("add_sub", FIRST, SECOND))
MALFORMED_CASES = [
    exchange("no message", b"\xff\xff\xff"),
    exchange("message that is cut off", _RIGHT[:-3]),
    exchange("message with a wrong wire type", b"\x08\x01" + _RIGHT),
    exchange("field number zero", b"\x02\x01a"),
    exchange("model name that is not UTF-8", b"\x0a\x02\xff\xfe"),
    exchange("id that is not UTF-8", _RIGHT + b"\x1a\x02\xff\xfe"),
    exchange("unknown field", _RIGHT + b"\xa2\x06\x03abc"),
    exchange("group", _RIGHT + b"\x9b\x06\x9c\x06"),
    exchange("group that does not end", _RIGHT + b"\x9b\x06"),
    Exchange("malformed ServerLive", [Call("ServerLive", b"\xff")]),
    Exchange("malformed ModelReady", [Call("ModelReady", b"\x0a\x05a")]),
    Exchange("malformed ModelStatistics", [Call("ModelStatistics", b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff")]),
    Exchange("malformed RepositoryModelLoad", [Call("RepositoryModelLoad", b"\x12\x05a")]),
]


@pytest.mark.parametrize(
    "exchange",
    [
        *NAME_CASES,
        *INPUT_CASES,
        *SHAPE_CASES,
        *TYPE_CASES,
        *SIZE_CASES,
        *CONTENTS_CASES,
        *OUTPUT_CASES,
        *FAULT_CASES,
        *MALFORMED_CASES,
    ],
    ids=lambda exchange: exchange.name,
)
def test_refusals(pair: Pair, exchange: Exchange) -> None:
    pair.compare(exchange)
