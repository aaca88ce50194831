"""ModelStreamInfer: the responses to the requests of a stream, in order."""

from __future__ import annotations

import pytest
from support.parity.exchange import Exchange, Stream
from support.parity.inference import Input, Output, infer, raw_input
from support.parity.pair import Pair
from tritonclient.grpc import service_pb2 as pb

ROW = [[1, 2, 3, 4]]
FIRST, SECOND = raw_input("INPUT0", ROW), raw_input("INPUT1", ROW)
TELL_THE_LAST = {"triton_enable_empty_final_response": True}


def stream(name: str, *requests: pb.ModelInferRequest | bytes) -> Exchange:
    return Exchange(name, [Stream(requests)])


def add_sub(**more: object) -> pb.ModelInferRequest:
    return infer("add_sub", FIRST, SECOND, **more)


def repeat(count: int, **more: object) -> pb.ModelInferRequest:
    return infer("repeat", raw_input("IN", [count]), **more)


ONE_ANSWER_CASES = [
    stream("no requests"),
    stream("one request", add_sub()),
    stream("one request with an id", add_sub(request_id="one")),
    stream("three requests", *(add_sub(request_id=str(index)) for index in range(3))),
    stream("one request whose last answer is reported", add_sub(parameters=TELL_THE_LAST, request_id="a")),
    stream("last answer told and not told", add_sub(parameters=TELL_THE_LAST), add_sub()),
    stream("last answer expressly not told", add_sub(parameters={"triton_enable_empty_final_response": False})),
    stream("classes", add_sub(outputs=[Output("OUTPUT0", {"classification": 2})])),
    stream("version", infer("versions", version="1")),
    stream(
        "model that tells what it sees", infer("seen", request_id="x", parameters={"colour": "red", **TELL_THE_LAST})
    ),
    stream("model without outputs", infer("faults", raw_input("MODE", [b"no_outputs"], "object"))),
]
MANY_ANSWERS_CASES = [
    stream("decoupled: one answer", repeat(1)),
    stream("decoupled: three answers", repeat(3, request_id="r")),
    stream("decoupled: no answer", repeat(0)),
    stream("decoupled: one answer and the end", repeat(1, parameters=TELL_THE_LAST)),
    stream("decoupled: three answers and the end", repeat(3, request_id="r", parameters=TELL_THE_LAST)),
    stream("decoupled: no answer and the end", repeat(0, request_id="r", parameters=TELL_THE_LAST)),
    stream("decoupled: an error behind an answer", repeat(-1, request_id="r")),
    stream("decoupled: an error behind two answers and the end", repeat(-2, request_id="r", parameters=TELL_THE_LAST)),
    stream("decoupled: one output", repeat(2, outputs=["OUT"])),
    stream("decoupled: classes", repeat(2, outputs=[Output("OUT", {"classification": 1})])),
]
REFUSED_CASES = [
    stream("unknown model in a stream", infer("missing", request_id="a")),
    stream("unknown model in a stream without an id", infer("missing")),
    stream("good behind bad", infer("missing", request_id="a"), add_sub(request_id="b")),
    stream("unknown version in a stream", infer("versions", version="2")),
    stream("no version in a stream", infer("versions", version="abc")),
    stream("missing input in a stream", infer("add_sub", FIRST, request_id="a")),
    stream("unknown input in a stream", infer("add_sub", FIRST, raw_input("NOPE", ROW))),
    stream("unknown output in a stream", add_sub(outputs=["NOPE"], request_id="a")),
    stream("wrong shape in a stream", infer("add_sub", FIRST, raw_input("INPUT1", [[1]]))),
    stream("wrong datatype in a stream", infer("add_sub", FIRST, raw_input("INPUT1", ROW, "float32"))),
    stream("no data in a stream", infer("add_sub", FIRST, Input("INPUT1", "INT32", [1, 4]))),
    stream("unknown model whose last answer is reported", infer("missing", request_id="a", parameters=TELL_THE_LAST)),
    stream(
        "missing input whose last answer is reported", infer("add_sub", FIRST, request_id="a", parameters=TELL_THE_LAST)
    ),
    stream("error of a model in a stream", infer("faults", raw_input("MODE", [b"error"], "object"), request_id="a")),
    stream(
        "error of a model whose last answer is reported",
        infer("faults", raw_input("MODE", [b"error"], "object"), request_id="a", parameters=TELL_THE_LAST),
    ),
    stream(
        "error of a member in a stream", infer("faulty_chain", raw_input("MODE", [b"error"], "object"), request_id="a")
    ),
    stream("wrong input of a decoupled model", infer("repeat", raw_input("IN", [1], "float32"), request_id="a")),
    stream("last answer told by a number", add_sub(parameters={"triton_enable_empty_final_response": 1})),
    stream("last answer told by a text", add_sub(parameters={"triton_enable_empty_final_response": "true"})),
    stream("negative classes in a stream", add_sub(outputs=[Output("OUTPUT0", {"classification": -1})])),
]


@pytest.mark.parametrize(
    "exchange", [*ONE_ANSWER_CASES, *MANY_ANSWERS_CASES, *REFUSED_CASES], ids=lambda exchange: exchange.name
)
def test_streams(pair: Pair, exchange: Exchange) -> None:
    pair.compare(exchange)
