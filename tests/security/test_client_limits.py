"""Limits of one client: requests in flight, and requests a second, over gRPC, streams and HTTP together."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from support.paced_models import drop_paced
from support.server import RocserveProcess, Start
from support.waiting import PATIENCE_SECONDS, wait_until

from rocserve.protocol import grpc_service_pb2 as pb

SERVICE = "/inference.GRPCInferenceService/"


@pytest.fixture(scope="module")
def server(start: Start, tmp_path_factory: pytest.TempPathFactory) -> RocserveProcess:
    folder = tmp_path_factory.mktemp("clients")
    (folder / "repository").mkdir()
    drop_paced(folder / "repository", "paced")
    return start(folder / "repository", "--max-requests-per-client=2")


def paced(milliseconds: int) -> bytes:
    request = pb.ModelInferRequest(model_name="paced", raw_input_contents=[milliseconds.to_bytes(4, "little")])
    request.inputs.add(name="MS", datatype="INT32", shape=[1])
    return request.SerializeToString()


def over_http(server: RocserveProcess) -> tuple[int, str]:
    body = {"inputs": [{"name": "MS", "datatype": "INT32", "shape": [1], "data": [0]}]}
    url = f"http://{server.http_address}/v2/models/paced/infer"
    try:
        with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=PATIENCE_SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_requests_in_flight(server: RocserveProcess) -> None:
    with grpc.insecure_channel(server.address) as channel:
        infer, live = (channel.unary_unary(SERVICE + name) for name in ("ModelInfer", "ServerLive"))
        calls = [infer.future(paced(3000), timeout=PATIENCE_SECONDS) for _ in range(8)]
        # Six are refused immediately, while two are in the model.
        wait_until(lambda: sum(call.done() for call in calls) == 6)
        refused = [call for call in calls if call.done()]
        assert {call.code() for call in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert "the client 127.0.0.1 has 2 requests in flight" in refused[0].details()
        status, text = over_http(server)
        assert (status, "--max-requests-per-client" in text) == (429, True)
        [answer] = channel.stream_stream(SERVICE + "ModelStreamInfer")(iter([paced(0)]), timeout=PATIENCE_SECONDS)
        assert "--max-requests-per-client" in pb.ModelStreamInferResponse.FromString(answer).error_message
        # Only inference is limited.
        assert live(b"", timeout=PATIENCE_SECONDS) == b"\x08\x01"
        assert all(call.result() for call in calls if call not in refused)
        assert infer(paced(0), timeout=PATIENCE_SECONDS)
    assert over_http(server)[0] == 200


def test_requests_a_second(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("rate")
    (folder / "repository").mkdir()
    drop_paced(folder / "repository", "paced")
    # A rate that works on a slow machine, too: within the test hardly any requests are added to those of the first
    # second.
    flags = ("--max-request-rate-per-client=3",)
    with RocserveProcess([folder / "repository"], *flags, log=folder / "server.log") as server:
        server.wait_until_ready()
        with ThreadPoolExecutor(20) as pool:
            answers = list(pool.map(lambda _: over_http(server), range(60)))
    refused = [text for status, text in answers if status == 429]
    assert sum(status == 200 for status, _ in answers) >= 3
    assert "--max-request-rate-per-client" in refused[0]
    assert len(refused) >= 20
