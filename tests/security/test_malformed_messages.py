"""Bytes that are not messages, or almost are, to every method of a real server."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.models import add_sub, drop
from support.server import RocserveProcess, Start
from support.waiting import PATIENCE_SECONDS, wait_until

from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.protocol import health_pb2

INFERENCE = "/inference.GRPCInferenceService/"
HEALTH = "/grpc.health.v1.Health/"
UNARY = {
    INFERENCE + method.name: method.input_type._concrete_class
    for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
    if method.name != "ModelStreamInfer"
} | {HEALTH + "Check": health_pb2.HealthCheckRequest}
STREAMS = (INFERENCE + "ModelStreamInfer", HEALTH + "Watch")
SERVERS_OWN_FAULTS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED)
WRONG_SEQUENCE_ID = (
    bytes.fromhex("0a07") + b"add_sub" + bytes.fromhex("2212") + b"\x0a\x0bsequence_id\x12\x03\x10\x01\x18"
)
"""A parameter whose entry is cut off in its value."""


@pytest.fixture(scope="module")
def server(start: Start, tmp_path_factory: pytest.TempPathFactory) -> RocserveProcess:
    folder = tmp_path_factory.mktemp("malformed")
    (folder / "repository").mkdir()
    drop(folder / "repository", "add_sub", add_sub())
    return start(folder / "repository", "--log-verbose=0")


@pytest.fixture(scope="module")
def channel(server: RocserveProcess) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address) as opened:
        yield opened


def inference() -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="add_sub", id="seven", raw_input_contents=[bytes(64), bytes(64)])
    for name in ("INPUT0", "INPUT1"):
        request.inputs.add(name=name, datatype="INT32", shape=[1, 16])
    request.parameters["sequence_id"].int64_param = 1
    request.parameters["sequence_start"].bool_param = True
    request.parameters["priority"].int64_param = 2
    return request


def seeds() -> list[bytes]:
    """Valid messages to damage: some fields of each method can be read as another's."""
    load = pb.RepositoryModelLoadRequest(model_name="none")
    load.parameters["config"].string_param = "{}"
    trace = pb.TraceSettingRequest()
    trace.settings["trace_level"].value.append("OFF")
    return [
        inference().SerializeToString(),
        load.SerializeToString(),
        trace.SerializeToString(),
        pb.ModelMetadataRequest(name="add_sub", version="1").SerializeToString(),
        WRONG_SEQUENCE_ID,
    ]


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A message with bytes changed, inserted or cut off."""
    data = bytearray(draw(st.sampled_from(seeds())))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        kind = draw(st.sampled_from(["change", "insert", "cut", "repeat"]))
        if kind == "change" and at < len(data):
            data[at] = draw(st.integers(0, 255))
        elif kind == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=8))
        elif kind == "cut":
            del data[at:]
        else:
            data += data[at:]
    return bytes(data)


def code_of(call: grpc.Call) -> grpc.StatusCode:
    try:
        call.result(timeout=PATIENCE_SECONDS)
    except grpc.RpcError:
        pass
    return call.code()


@settings(max_examples=75, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=damaged())
@example(data=WRONG_SEQUENCE_ID)
@example(data=b"\xff")
def test_no_message_is_the_servers_own_fault(channel: grpc.Channel, data: bytes) -> None:
    calls = {name: channel.unary_unary(name).future(data, timeout=PATIENCE_SECONDS) for name in UNARY}
    streams = {name: channel.stream_stream(name)(iter([data]), timeout=PATIENCE_SECONDS) for name in STREAMS}
    for name, call in calls.items():
        assert code_of(call) not in SERVERS_OWN_FAULTS, f"{name}: {call.details()}"
    for name, stream in streams.items():
        if name.endswith("Watch"):
            # This stream lasts as long as its client wants.
            try:
                next(stream)
            except grpc.RpcError:
                assert stream.code() not in SERVERS_OWN_FAULTS, f"{name}: {stream.details()}"
            stream.cancel()
        else:
            assert [answer for answer in stream if not answer] == []
            assert stream.code() is grpc.StatusCode.OK, f"{name}: {stream.details()}"


@pytest.mark.parametrize("method", sorted(UNARY))
def test_what_is_no_message_is_an_invalid_argument(channel: grpc.Channel, method: str) -> None:
    call = channel.unary_unary(method).future(b"\xff", timeout=PATIENCE_SECONDS)
    assert code_of(call) is grpc.StatusCode.INVALID_ARGUMENT
    assert f"the request is not a valid {UNARY[method].DESCRIPTOR.full_name}: " in call.details()


def test_a_stream_survives_what_is_no_message(channel: grpc.Channel) -> None:
    good = inference()
    good.ClearField("parameters")
    messages = iter([b"\xff", WRONG_SEQUENCE_ID, good.SerializeToString()])
    stream = channel.stream_stream(INFERENCE + "ModelStreamInfer")(messages, timeout=PATIENCE_SECONDS)
    answers = [pb.ModelStreamInferResponse.FromString(answer) for answer in stream]
    assert ["not a valid" in answer.error_message for answer in answers[:2]] == [True, True]
    assert answers[2].error_message == ""
    assert answers[2].infer_response.id == "seven"


def test_a_watch_of_what_is_no_message_is_an_invalid_argument(channel: grpc.Channel) -> None:
    stream = channel.stream_stream(HEALTH + "Watch")(iter([b"\xff"]), timeout=PATIENCE_SECONDS)
    with pytest.raises(grpc.RpcError):
        next(stream)
    assert stream.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_the_log_has_no_traceback_of_all_that(server: RocserveProcess) -> None:
    """The last test of this server."""
    assert server.terminate() == 0
    wait_until(lambda: "ended" in server.log_text)
    assert "Traceback" not in server.log_text
