"""Clients of several servers: which server they ask, and which calls gRPC's service config retries."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import PATIENCE_SECONDS
from unit.client.conftest import LoopbackServer

from rocserve.protocol import grpc_service_pb2 as pb
from rocserve_client import Balancing, Client, Internal, InvalidArgument, Tls, Unavailable
from rocserve_client.messages import decode_infer_response, decode_stream_response
from rocserve_client.wire import join, split

CONTENTS = st.lists(st.one_of(st.binary(max_size=300), st.integers(0, 40_000).map(bytes)), max_size=5)


@given(name=st.text(max_size=200), shapes=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4), contents=CONTENTS)
def test_joined_and_split_like_protobuf(name: str, shapes: list[int], contents: list[bytes]) -> None:
    head = pb.ModelInferRequest(model_name=name, id="i")
    head.inputs.add(name=name, datatype="BYTES", shape=shapes)
    whole = pb.ModelInferRequest()
    whole.CopyFrom(head)
    whole.raw_input_contents.extend(contents)

    joined = join(head.SerializeToString(), 7, contents)
    assert pb.ModelInferRequest.FromString(joined) == whole
    rest, views = split(whole.SerializeToString(), 7)
    assert pb.ModelInferRequest.FromString(rest) == head
    assert [bytes(view) for view in views] == contents


@given(contents=CONTENTS)
def test_fields_in_any_order(contents: list[bytes]) -> None:
    """Protobuf allows a field's occurrences anywhere in a message, between unknown fields of every wire type."""
    others = (
        pb.InferParameter(double_param=1.5).SerializeToString() + pb.InferParameter(int64_param=-1).SerializeToString()
    )
    fixed32 = b"\x45\x00\x00\x80\x3f"
    message = b"".join(others + join(b"", 7, [content]) + fixed32 for content in contents)
    rest, views = split(message, 7)
    assert rest == (others + fixed32) * len(contents)
    assert [bytes(view) for view in views] == contents


@given(data=st.binary(max_size=40))
def test_no_bytes_do_worse_than_a_clear_error(data: bytes) -> None:
    try:
        rest, views = split(data, 6)
    except ValueError:
        return
    assert len(rest) + sum(len(view) for view in views) <= len(data)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (b"\x32\x05ab", "3 bytes past the end"),
        (b"\x32", "ends within the field"),
        (b"\x33", "a group begins at byte 0"),
        (b"\x80" * 11, "varint of more than 5 bytes"),
        (join(b"", 6, [b"data"]), "0 outputs but raw_output_contents for 1"),
        (pb.ModelInferResponse(parameters={"p": pb.InferParameter()}).SerializeToString(), "parameter without a value"),
        (pb.ModelInferResponse(outputs=[{"name": "A", "datatype": "FP32", "shape": [1]}]).SerializeToString(), "for 0"),
    ],
)
def test_an_answer_that_makes_no_sense(message: bytes, text: str) -> None:
    with pytest.raises(Internal, match=text):
        decode_infer_response(message)


@pytest.mark.parametrize(("datatype", "raw"), [("FP32", b"abc"), ("BYTES", b"\x05\x00\x00\x00ab"), ("FP31", b"abcd")])
def test_an_output_that_does_not_fit_its_head(datatype: str, raw: bytes) -> None:
    answer = pb.ModelInferResponse(raw_output_contents=[raw])
    answer.outputs.add(name="A", datatype=datatype, shape=[1])
    with pytest.raises(Internal, match=rf"output 'A' cannot be read as {datatype} of shape \[1\]"):
        decode_infer_response(answer.SerializeToString())


def test_a_stream_answer_that_makes_no_sense() -> None:
    with pytest.raises(Internal, match="expected a ModelStreamInferResponse"):
        decode_stream_response(b"\x12\x05ab")
    with pytest.raises(Internal, match="expected a ModelInferResponse"):
        decode_stream_response(b"\x12\x02\x32\x05")


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A self-signed certificate for localhost: the paths of its key and of the certificate."""
    key, certificate = folder / f"{name}.key", folder / f"{name}.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return key, certificate


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates of this test")
def test_mutual_tls(call: Any, loopback: Any, serve: Any, tmp_path: Path) -> None:
    server_key, server_certificate = make_certificate(tmp_path, "server")
    client_key, client_certificate = make_certificate(tmp_path, "client")
    credentials = grpc.ssl_server_credentials(
        [(server_key.read_bytes(), server_certificate.read_bytes())],
        root_certificates=client_certificate.read_bytes(),
        require_client_auth=True,
    )
    serve(loopback, credentials)
    mutual = Tls(server_certificate, client_key, client_certificate)
    assert call(loopback.address, "server_live", connection={"tls": mutual}, timeout=PATIENCE_SECONDS)
    for refused in (Tls(server_certificate), Tls(client_certificate, client_key, client_certificate), None):
        with pytest.raises(Unavailable):
            call(loopback.address, "server_live", connection={"tls": refused}, timeout=PATIENCE_SECONDS)


LARGE = {"A": np.zeros(1 << 20, np.uint8)}
"""More than gRPC keeps by default in order to send it again."""


@pytest.mark.parametrize(("model", "error", "attempts"), [("UNAVAILABLE", Unavailable, 3), ("INTERNAL", Internal, 1)])
def test_what_may_be_tried_again_is(
    call: Any, loopback: Any, model: str, error: type[Exception], attempts: int
) -> None:
    with pytest.raises(error):
        call(loopback.address, "infer", f"fails.{model}", LARGE, connection={"balancing": Balancing(attempts=3)})
    assert len(loopback.requests) == attempts


def test_without_it_nothing_is_tried_again(call: Any, loopback: Any) -> None:
    for connection in ({}, {"balancing": Balancing(attempts=1)}):
        loopback.requests.clear()
        with pytest.raises(Unavailable):
            call(loopback.address, "infer", "fails.UNAVAILABLE", LARGE, connection=connection)
        assert len(loopback.requests) == 1


def test_requests_of_sequences_are_refused(call: Any, loopback: Any) -> None:
    with pytest.raises(InvalidArgument, match="on a stream"):
        call(
            loopback.address, "infer", "echo", {}, parameters={"sequence_id": 7}, connection={"balancing": Balancing()}
        )
    assert loopback.requests == []


def test_all_servers_are_asked_and_none_that_has_gone(serve: Callable[..., grpc.Server]) -> None:
    servers = [LoopbackServer() for _ in range(3)]
    running = [serve(server) for server in servers]
    with Client("ipv4:" + ",".join(server.address for server in servers), balancing=Balancing()) as client:
        asked = Counter[int]()
        while len(asked) < len(servers):
            client.infer("echo", {})
            asked.update(index for index, server in enumerate(servers) if server.requests)
        running[0].stop(None).wait()
        for _ in range(20):
            client.infer("echo", {})
