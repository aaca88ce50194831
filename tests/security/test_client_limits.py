"""The limit of one client's requests in flight, over gRPC, streams and HTTP together; the rate's is in
tests/unit/services/test_client_limits.py."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path

import grpc
from support.gated_models import drop_gated
from support.server import RocserveProcess
from support.waiting import PATIENCE_SECONDS, wait_until

from rocserve.protocol import grpc_service_pb2 as pb

SERVICE = "/inference.GRPCInferenceService/"


def infer_request() -> bytes:
    request = pb.ModelInferRequest(model_name="gated", raw_input_contents=[bytes(8)])
    request.inputs.add(name="X", datatype="FP32", shape=[1, 2])
    return request.SerializeToString()


def over_http(server: RocserveProcess) -> tuple[int, str]:
    body = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 2], "data": [0, 0]}]}
    url = f"http://{server.http_address}/v2/models/gated/infer"
    try:
        with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=PATIENCE_SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_requests_in_flight(repository: Path, tmp_path: Path) -> None:
    gate, flag = drop_gated(repository), "--max-requests-per-client=2"
    with (
        RocserveProcess([repository], flag, log=tmp_path / "server.log") as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        server.wait_until_ready()
        infer, live = (channel.unary_unary(SERVICE + name) for name in ("ModelInfer", "ServerLive"))
        calls = [infer.future(infer_request(), timeout=PATIENCE_SECONDS) for _ in range(8)]
        # Six are refused immediately, while two are in the server.
        wait_until(lambda: sum(call.done() for call in calls) == 6)
        refused = [call for call in calls if call.done()]
        assert {call.code() for call in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert "the client 127.0.0.1 has 2 requests in flight" in refused[0].details()
        status, text = over_http(server)
        assert (status, "--max-requests-per-client" in text) == (429, True)
        [answer] = channel.stream_stream(SERVICE + "ModelStreamInfer")(
            iter([infer_request()]), timeout=PATIENCE_SECONDS
        )
        assert "--max-requests-per-client" in pb.ModelStreamInferResponse.FromString(answer).error_message
        # Only inference is limited.
        assert live(b"", timeout=PATIENCE_SECONDS) == b"\x08\x01"
        gate.touch()
        assert all(call.result() for call in calls if call not in refused)
        assert infer(infer_request(), timeout=PATIENCE_SECONDS)
        assert over_http(server)[0] == 200
