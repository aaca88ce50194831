"""gRPC served by front-end processes: clients get the same answers as from one process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from support.front_ends import clients_of
from support.gated_models import drop_gated, gate_of, waiting
from support.http_requests import ask
from support.infer_inputs import infer_input
from support.load import ConstantLoad
from support.metrics import port_of, scrape
from support.models import ADD_CONSTANT_CONFIG, add_constant, drop
from support.sequences import run_at_once, run_sequence
from support.server import RocserveProcess
from support.shared_memory import shared_file
from support.waiting import PATIENCE_SECONDS, wait_until
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from rocserve.protocol import health_pb2

IMAGES = sorted((Path(__file__).parents[1] / "data" / "digits").glob("*.jpg"))[:8]
SECRET = ("triton-grpc-protocol-key", "word")
LARGE = 24 << 20


@pytest.fixture
def server(front_ends_server: RocserveProcess) -> RocserveProcess:
    return front_ends_server


def own_client(server: RocserveProcess) -> triton.InferenceServerClient:
    """A client with a separate connection, and so with a random front end."""
    any_size = [(f"grpc.max_{way}_message_length", -1) for way in ("send", "receive")]
    arguments = [("grpc.use_local_subchannel_pool", 1), *any_size]
    return triton.InferenceServerClient(server.address, channel_args=arguments)


@pytest.fixture
def clients(server: RocserveProcess) -> Iterator[list[triton.InferenceServerClient]]:
    """So many that each front end has a connection of one of them; the kernel chooses by chance."""
    made: list[triton.InferenceServerClient] = []

    def have_all() -> bool:
        for _ in range(16):
            made.append(own_client(server))
            assert made[-1].is_server_live()
        return all(clients_of(front_end, server.port) for front_end in server.front_ends())

    wait_until(have_all, "a connection of each front end")
    yield made
    for client in made:
        client.close()


def tensor(name: str, values: np.ndarray, datatype: str) -> triton.InferInput:
    return infer_input(name, values)


def test_all_front_ends_serve(server: RocserveProcess, clients: list[triton.InferenceServerClient]) -> None:
    values = np.array([[1.0, 2.0]], np.float32)
    for number, client in enumerate(clients):
        answer = client.infer("m", [tensor("X", values + number, "FP32")], request_id=str(number))
        assert answer.get_response().id == str(number)
        assert answer.as_numpy("Y").tolist() == (values + number + 1).tolist()
        assert client.get_model_metadata("m").name == "m"
    assert "gRPC is served by 2 processes, as --front-ends says" in server.log_text
    assert server.log_text.count("Started GRPCInferenceService") == 1


def test_from_an_image_to_its_label(clients: list[triton.InferenceServerClient]) -> None:
    def classify(number: int) -> None:
        path = IMAGES[number]
        entry = infer_input("ENCODED", np.array([[path.read_bytes()]], dtype=object))
        label = clients[number].infer("digits", [entry]).as_numpy("LABEL")[0, 0].decode()
        assert label == path.stem.rpartition("_")[2]

    run_at_once(len(IMAGES), classify)


def test_a_stream_in_order_and_responses_of_a_decoupled_model(server: RocserveProcess) -> None:
    answers: queue.Queue[tuple[triton.InferResult | None, Exception | None]] = queue.Queue()
    client = own_client(server)
    client.start_stream(lambda result, error: answers.put((result, error)))
    for number in range(30):
        client.async_stream_infer(
            "m", [tensor("X", np.full((1, 2), number, np.float32), "FP32")], request_id=f"{number}"
        )
    for number in range(30):
        result, error = answers.get(timeout=PATIENCE_SECONDS)
        assert error is None
        assert result is not None
        assert result.get_response().id == str(number)
        assert result.as_numpy("Y")[0, 0] == number + 1
    wanted = [
        tensor("IN", np.array([5, 6, 7], np.int32), "INT32"),
        tensor("DELAY", np.array([1, 1, 1], np.uint32), "UINT32"),
        tensor("WAIT", np.array([1], np.uint32), "UINT32"),
    ]
    client.async_stream_infer("repeat_int32", wanted, enable_empty_final_response=True)
    came = [answers.get(timeout=PATIENCE_SECONDS)[0] for _ in range(4)]
    assert [int(result.as_numpy("OUT")[0]) for result in came[:3] if result is not None] == [5, 6, 7]
    assert came[3] is not None
    assert came[3].get_response().parameters["triton_final_response"].bool_param is True
    client.stop_stream()


def test_sequences_of_many_connections(clients: list[triton.InferenceServerClient]) -> None:
    def run(number: int) -> None:
        assert run_sequence(clients[number], "sums", number + 1, [number, 1, 2]) == [number, number + 1, number + 3]

    run_at_once(8, run)


def test_a_client_s_own_memory(clients: list[triton.InferenceServerClient]) -> None:
    values = np.array([[3.0, 4.0]], np.float32)
    with shared_file(64, "front_ends") as memory:
        memory.put(0, values.tobytes())
        clients[0].register_system_shared_memory("memory", memory.key, 64)
        try:
            for client in clients[:4]:
                entry, output = triton.InferInput("X", [1, 2], "FP32"), triton.InferRequestedOutput("Y")
                entry.set_shared_memory("memory", 8)
                output.set_shared_memory("memory", 8, 16)
                answer = client.infer("m", [entry], outputs=[output])
                assert answer.get_output("Y").name == "Y"
                assert np.frombuffer(memory.get(16, 8), np.float32).tolist() == [4.0, 5.0]
                memory.put(16, bytes(8))
        finally:
            clients[1].unregister_system_shared_memory("memory")


def test_a_model_that_comes_with_a_call_and_a_question_meanwhile(
    server: RocserveProcess, clients: list[triton.InferenceServerClient]
) -> None:
    """The call is many times as large as the control socket's buffer, and must not keep others from their answers."""
    files = {"file:1/model.onnx": add_constant(5.0), "file:1/beside.bin": bytes(LARGE)}
    config = '{"name": "brought", "platform": "onnx_onnxv1"}'
    with ThreadPoolExecutor(1) as pool:
        loaded = pool.submit(clients[0].load_model, "brought", config=config, files=files)
        while not loaded.done():
            assert all(client.is_server_live() for client in clients[:4])
        loaded.result()
    values = tensor("X", np.zeros((1, 2), np.float32), "FP32")
    assert clients[1].infer("brought", [values]).as_numpy("Y").tolist() == [[5.0, 5.0]]
    clients[2].unload_model("brought")
    wait_until(lambda: not clients[3].is_model_ready("brought"), "the end of the model")


def test_health_is_watched(server: RocserveProcess, clients: list[triton.InferenceServerClient]) -> None:
    states: queue.Queue[int] = queue.Queue()
    with grpc.insecure_channel(server.address) as channel:
        watching = channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        unknown = watching(health_pb2.HealthCheckRequest(service="nobody"))
        assert next(unknown).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        unknown.cancel()
        watch = watching(health_pb2.HealthCheckRequest(service="simple"))

        def follow() -> None:
            try:
                for answer in watch:
                    states.put(answer.status)
            except grpc.RpcError:
                pass  # It is cancelled below.

        threading.Thread(target=follow, daemon=True).start()
        assert states.get(timeout=PATIENCE_SECONDS) == health_pb2.HealthCheckResponse.SERVING
        clients[0].unload_model("simple")
        assert states.get(timeout=PATIENCE_SECONDS) != health_pb2.HealthCheckResponse.SERVING
        clients[1].load_model("simple")
        while states.get(timeout=PATIENCE_SECONDS) != health_pb2.HealthCheckResponse.SERVING:
            pass  # Other states of its end.
        watch.cancel()


def test_restricted_methods(clients: list[triton.InferenceServerClient]) -> None:
    for client in clients[:4]:
        with pytest.raises(InferenceServerException, match="expecting header 'triton-grpc-protocol-key'"):
            client.get_log_settings()
        assert client.get_log_settings(headers=dict([SECRET])).settings


def test_the_log_tells_of_requests(server: RocserveProcess, clients: list[triton.InferenceServerClient]) -> None:
    """The log's request settings change while requests come."""
    values = tensor("X", np.zeros((1, 2), np.float32), "FP32")
    settings = {"log_verbose_level": 1}
    clients[0].update_log_settings(settings, headers=dict([SECRET]))
    try:
        for number, client in enumerate(clients):
            client.infer("m", [values], request_id=f"seen-{number}")
        wait_until(lambda: all(f"seen-{number}" in server.log_text for number in range(len(clients))), "all ids")
    finally:
        clients[0].update_log_settings({"log_verbose_level": 0}, headers=dict([SECRET]))


@pytest.mark.parametrize("how", ["cancelled", "late"])
def test_what_nobody_waits_for_is_not_run(
    server: RocserveProcess, clients: list[triton.InferenceServerClient], how: str
) -> None:
    def executed() -> int:
        return int(clients[-1].get_inference_statistics("gated").model_stats[0].execution_count)

    gate_of(server).unlink(missing_ok=True)
    before, count = executed(), 20
    told: queue.Queue[Exception | None] = queue.Queue()
    values = [tensor("X", np.zeros((1, 2), np.float32), "FP32")]
    seconds = 0.3 if how == "late" else None
    calls = [
        clients[number % 4].async_infer("gated", values, lambda result, error: told.put(error), client_timeout=seconds)
        for number in range(count)
    ]
    if how == "cancelled":
        wait_until(lambda: waiting(server) == count - 1, "one request that runs, and those that wait")
        for call in calls:
            call.cancel()
    assert None not in [told.get(timeout=PATIENCE_SECONDS) for _ in range(count)]
    # Once these are answered, the front ends have read whatever was sent before on the same connections.
    assert all(client.is_server_live() for client in clients[:4])
    wait_until(lambda: waiting(server) == 0, "the end of all that wait")
    gate_of(server).touch()
    assert clients[5].infer("gated", values).as_numpy("Y") is not None
    # The one that ran meanwhile, and the last one.
    assert executed() - before <= 2


def test_memory_of_requests_is_counted_in_all(server: RocserveProcess) -> None:
    """A front end reports the memory that it holds: here for a stream whose client does not read."""
    port = port_of(server)

    def answers() -> float:
        return float(scrape(port)['rocserve_request_memory_bytes{kind="answer"}'])

    read = threading.Event()
    nbytes = 1 << 20

    def requests() -> Iterator[service_pb2.ModelInferRequest]:
        for _ in range(12):
            request = service_pb2.ModelInferRequest(model_name="large", raw_input_contents=[bytes(nbytes)])
            request.inputs.add(name="INPUT0", datatype="UINT8", shape=[nbytes])
            yield request
        read.wait(PATIENCE_SECONDS)

    with grpc.insecure_channel(server.address) as channel:
        stream = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
        )(requests())
        wait_until(lambda: answers() > nbytes, "a report of the front end")
        read.set()
        for _ in range(12):
            assert not next(stream).error_message
        wait_until(lambda: answers() == 0, "the report that all has been read")


def test_a_swap_and_the_end_lose_no_request(tmp_path: Path) -> None:
    """Over gRPC and over HTTP."""
    repository = tmp_path / "repository"
    drop(repository, "m", add_constant(1.0), ADD_CONSTANT_CONFIG)
    gate = drop_gated(repository)
    told: queue.Queue[Exception | None] = queue.Queue()
    body = {"inputs": [{"name": "X", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}
    flags = ("--front-ends=2", "--repository-settle-secs=0.1", "--exit-timeout-secs=600")
    with (
        RocserveProcess([repository], *flags, log=tmp_path / "plain.log") as server,
        ThreadPoolExecutor(16) as pool,
    ):
        server.wait_until_ready()
        with ConstantLoad(server.address, "m", {1.0, 2.0}) as load:
            load.wait_until_answered_by(1.0)
            drop(repository, "m", add_constant(2.0), ADD_CONSTANT_CONFIG, version=2)
            load.wait_until_answered_by(2.0)
        assert (load.failures, load.wrong) == ([], [])
        clients = [own_client(server) for _ in range(4)]
        values = [tensor("X", np.zeros((1, 2), np.float32), "FP32")]
        for client in clients * 2:
            client.async_infer("gated", values, lambda result, error: told.put(error))
        answers = [pool.submit(ask, server, "POST", "/v2/models/gated/infer", body) for _ in range(16)]
        wait_until(lambda: waiting(server) == 23, "one request that runs, and those that wait")
        server.begin_end()
        gate.touch()
        assert server.process is not None
        assert server.process.wait(PATIENCE_SECONDS) == 0
    assert [told.get(timeout=PATIENCE_SECONDS) for _ in range(8)] == [None] * 8
    assert {answer.result()[0] for answer in answers} == {200}
