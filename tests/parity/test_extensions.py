"""Extensions of inference: classification, and the parameters of requests, inputs and outputs."""

from __future__ import annotations

import numpy as np
import pytest
from support.parity.exchange import Call, Exchange
from support.parity.inference import Input, Output, Parameters, infer, raw_input
from support.parity.pair import Pair
from tritonclient.grpc import service_pb2 as pb

VALUES = [[0.25, -3.5, 8.0, 1e10], [2.0, 2.0, -1e-7, 2.0]]


def exchange(name: str, request: pb.ModelInferRequest) -> Exchange:
    return Exchange(name, [Call("ModelInfer", request)])


def classes(model: str, datatype: str, dtype: str, values: object, count: object) -> pb.ModelInferRequest:
    return infer(
        model,
        raw_input(f"INPUT_{datatype}", values, dtype),
        outputs=[Output(f"OUTPUT_{datatype}", {"classification": count})],
    )


CLASSIFICATION_CASES = [
    *(
        exchange(f"{count!r} classes", classes("types", "FP32", "float32", VALUES, count))
        for count in (1, 2, 3, 4, 5, 1000, 0, -1, -(2**40), 2**31, 2**40, True, "2", 2.0, None)
    ),
    *(
        exchange(f"classes of {datatype}", classes("types", datatype, dtype, values, 3))
        for datatype, dtype, values in (
            ("UINT8", "uint8", [[3, 200, 7]]),
            ("UINT16", "uint16", [[3, 60000, 7]]),
            ("UINT32", "uint32", [[3, 4_000_000_000, 7]]),
            ("UINT64", "uint64", [[3, 2**63 + 5, 7]]),
            ("INT8", "int8", [[3, -100, 7]]),
            ("INT16", "int16", [[3, -30000, 7]]),
            ("INT32", "int32", [[3, -(2**31), 7]]),
            ("INT64", "int64", [[3, -(2**62), 2**62 + 1]]),
            ("FP32", "float32", [[3.5, -0.0, 1e-30]]),
            ("FP64", "float64", [[3.5, 1 / 3, 1e300]]),
        )
    ),
    *(
        exchange(f"classes of {datatype}, which Triton does not rank", classes("types", datatype, dtype, values, 2))
        for datatype, dtype, values in (("BOOL", "bool", [[True, False]]), ("FP16", "float16", [[1.5, 2.5]]))
    ),
    exchange("classes of BYTES, which cannot be ranked", classes("types", "BYTES", "object", [[b"a", b"b"]], 2)),
    exchange(
        "classes of BF16, which cannot be ranked",
        infer(
            "types",
            Input("INPUT_BF16", "BF16", [1, 2], bytes(4)),
            outputs=[Output("OUTPUT_BF16", {"classification": 2})],
        ),
    ),
    exchange("classes outside a batch", classes("types_whole", "FP32", "float32", VALUES[0], 2)),
    exchange("classes of infinite values", classes("types", "FP32", "float32", [[np.inf, -np.inf, 0]], 3)),
    exchange("classes of nothing", classes("types_whole", "FP32", "float32", [], 2)),
    exchange(
        "classes through an ensemble",
        infer("labelled", raw_input("IN", VALUES, "float32"), outputs=[Output("OUT", {"classification": 2})]),
    ),
    exchange(
        "classes of an output and the values of another",
        infer(
            "add_sub",
            raw_input("INPUT0", [[1, 2, 3, 4]]),
            raw_input("INPUT1", [[9, 1, 9, 1]]),
            outputs=[Output("OUTPUT1", {"classification": 2}), "OUTPUT0"],
        ),
    ),
    exchange(
        "classes of an output that is asked for twice",
        infer(
            "types",
            raw_input("INPUT_FP32", VALUES, "float32"),
            outputs=["OUTPUT_FP32", Output("OUTPUT_FP32", {"classification": 2})],
        ),
    ),
    exchange(
        "different classes of an output that is asked for twice",
        infer(
            "types",
            raw_input("INPUT_FP32", VALUES, "float32"),
            outputs=[Output("OUTPUT_FP32", {"classification": 1}), Output("OUTPUT_FP32", {"classification": 2})],
        ),
    ),
]


def unsigned(value: int) -> pb.InferParameter:
    return pb.InferParameter(uint64_param=value)


def with_parameters(name: str, parameters: Parameters) -> Exchange:
    return exchange(name, infer("seen", raw_input("IN", [1], "float32"), parameters=parameters))


PARAMETER_CASES = [
    *(
        with_parameters(f"parameter {key} = {shown}", {key: value})
        for key, shown, value in (
            ("colour", "text", "red"),
            ("colour", "empty text", ""),
            ("count", "number", 7),
            ("count", "number below zero", -7),
            ("count", "huge number", 2**63 - 1),
            ("flag", "yes", True),
            ("flag", "no", False),
            ("share", "fraction", 0.5),
            ("unsigned", "unsigned number", unsigned(7)),
            ("nothing", "no value", None),
            ("", "empty name", "x"),
            ("two words", "name with a space", "x"),
            ("priority", "0", 0),
            ("priority", "1", 1),
            ("priority", "unsigned 1", unsigned(1)),
            ("priority", "unsigned 99", unsigned(99)),
            ("priority", "below zero", -1),
            ("priority", "text", "1"),
            ("priority", "flag", True),
            ("priority", "fraction", 1.0),
            ("priority", "no value", None),
            ("timeout", "0", 0),
            ("timeout", "a minute", 60_000_000),
            ("timeout", "below zero", -1),
            ("timeout", "text", "5"),
            ("timeout", "text that is not a number", "soon"),
            ("timeout", "flag", True),
            ("timeout", "fraction", 1.5),
            ("timeout", "unsigned", unsigned(60_000_000)),
            ("timeout", "no value", None),
            ("sequence_id", "0", 0),
            ("sequence_id", "7", 7),
            ("sequence_id", "below zero", -7),
            ("sequence_id", "text", "seven"),
            ("sequence_id", "empty text", ""),
            ("sequence_id", "long text", "s" * 200),
            ("sequence_id", "flag", True),
            ("sequence_id", "fraction", 1.5),
            ("sequence_start", "yes", True),
            ("sequence_start", "number", 1),
            ("sequence_start", "text", "true"),
            ("sequence_end", "yes", True),
            ("sequence_end", "number", 1),
            ("triton_enable_empty_final_response", "yes", True),
            ("triton_enable_empty_final_response", "number", 1),
            ("triton_enable_empty_final_response", "text", "yes"),
            ("triton_unknown", "text", "x"),
            ("triton_", "text", "x"),
            ("Triton_x", "text", "x"),
            ("triton_final_response", "yes", True),
            ("binary_data_output", "yes", True),
            ("headers", "text", "x"),
        )
    ),
    with_parameters("parameters of all types", {"text": "red", "number": 7, "yes": True}),
    with_parameters("start and end of a sequence", {"sequence_id": 9, "sequence_start": True, "sequence_end": True}),
    exchange(
        "sequence through an ensemble",
        infer(
            "seen_chain",
            raw_input("IN", [1], "float32"),
            parameters={"sequence_id": 9, "sequence_start": True, "sequence_end": False},
        ),
    ),
    exchange(
        "sequence of text through an ensemble",
        infer("seen_chain", raw_input("IN", [1], "float32"), parameters={"sequence_id": "nine", "sequence_end": True}),
    ),
    exchange(
        "priority and timeout through an ensemble",
        infer("seen_chain", raw_input("IN", [1], "float32"), parameters={"priority": 2, "timeout": 60_000_000}),
    ),
    *(
        exchange(f"input parameter {name}", infer("seen", raw_input("IN", [1], "float32", **parameters)))
        for name, parameters in (
            ("binary_data_size", {"binary_data_size": 4}),
            ("binary_data_size of another size", {"binary_data_size": 400}),
            ("binary_data_size as text", {"binary_data_size": "4"}),
            ("of shared memory as a number", {"shared_memory_region": 1}),
            ("of shared memory that is not there", {"shared_memory_region": "nowhere", "shared_memory_byte_size": 4}),
            ("of shared memory without a size", {"shared_memory_region": "nowhere"}),
            ("shared_memory_byte_size alone", {"shared_memory_byte_size": 4}),
            ("shared_memory_offset alone", {"shared_memory_offset": 4}),
        )
    ),
    *(
        exchange(
            f"output parameter {name}",
            infer("seen", raw_input("IN", [1], "float32"), outputs=[Output("SEEN", parameters)]),
        )
        for name, parameters in (
            ("of shared memory that is not there", {"shared_memory_region": "nowhere", "shared_memory_byte_size": 4}),
            ("of shared memory without a size", {"shared_memory_region": "nowhere"}),
            ("of shared memory and classes", {"shared_memory_region": "nowhere", "classification": 1}),
            ("shared_memory_byte_size alone", {"shared_memory_byte_size": 4}),
            ("shared_memory_offset alone", {"shared_memory_offset": 4}),
        )
    ),
]


@pytest.mark.parametrize("exchange", [*CLASSIFICATION_CASES, *PARAMETER_CASES], ids=lambda exchange: exchange.name)
def test_extensions(pair: Pair, exchange: Exchange) -> None:
    pair.compare(exchange)
