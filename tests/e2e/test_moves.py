"""Front ends that come and go under load: no client notices."""

from __future__ import annotations

import http.client
import json
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from support.infer_inputs import infer_input
from support.metrics import FLAGS as METRICS
from support.metrics import port_of, scrape
from support.models import ADD_CONSTANT_CONFIG, add_constant, drop
from support.sequences import drop_accumulator, run_sequence
from support.server import RocserveProcess
from support.shared_memory import SharedFile, shared_file
from support.simple_models import drop_simple_models
from support.waiting import PATIENCE_SECONDS, wait_until

from rocserve.protocol import health_pb2

MOVES = int(os.environ.get("MOVES", "2"))
"""How often front ends come, and go, while clients ask."""
PROGRAM = (str(Path(__file__).parents[1] / "support" / "eager_server.py"),)
FLAGS = (
    "--front-ends=auto",
    "--log-verbose=1",
    "--allow-client-shm=true",
    "--max-requests-per-client=64",
    "--exit-timeout-secs=600",
    *METRICS,
)
COME, GO = "front ends take the ports", "the front ends leave the ports"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RocserveProcess]:
    repository = tmp_path / "repository"
    drop_simple_models(repository)
    drop(repository, "m", add_constant(1.0), ADD_CONSTANT_CONFIG)
    drop_accumulator(repository, "sums", "max_sequence_idle_microseconds: 90000000")
    with RocserveProcess([repository], *FLAGS, log=tmp_path / "log", program=PROGRAM) as running:
        running.wait_until_ready()
        # Levels of the log that the server writes for requests would hide the lines about front ends.
        running.client().update_log_settings({"log_verbose_level": 0})
        yield running


class Clients:
    """Threads that each repeat something until the end, and the errors of those that failed."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self.turns: dict[str, int] = {}
        self.ending = threading.Event()
        self._threads: list[threading.Thread] = []

    def repeat(self, name: str, ask: Callable[[int], None]) -> None:
        """Call `ask` with the number of the turn."""
        self.turns[name] = 0

        def run() -> None:
            try:
                while not self.ending.is_set():
                    ask(self.turns[name])
                    self.turns[name] += 1
            except BaseException as error:
                self.errors.append(error)

        self._threads.append(threading.Thread(target=run, daemon=True))

    @contextmanager
    def asking(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self.ending.set()
            for thread in self._threads:
                thread.join(PATIENCE_SECONDS)

    def wait_for_turns(self) -> None:
        """Wait until each client has finished two turns, so one of them has begun meanwhile."""
        before = dict(self.turns)
        wait_until(
            lambda: self.errors or all(self.turns[name] >= turn + 2 for name, turn in before.items()), "further turns"
        )
        assert self.errors == []


def own_client(server: RocserveProcess) -> triton.InferenceServerClient:
    return triton.InferenceServerClient(server.address, channel_args=[("grpc.use_local_subchannel_pool", 1)])


def pair(number: int) -> np.ndarray:
    return np.array([[number % 1000, 0.0]], np.float32)


def ask_over_grpc(server: RocserveProcess) -> Callable[[int], None]:
    client = own_client(server)

    def ask(turn: int) -> None:
        answer = client.infer("m", [infer_input("X", pair(turn))], request_id=f"{turn}")
        assert answer.as_numpy("Y").tolist() == (pair(turn) + 1).tolist()
        assert answer.get_response().id == f"{turn}"

    return ask


def ask_over_http(server: RocserveProcess) -> Callable[[int], None]:
    client = triton_http.InferenceServerClient(server.http_address)

    def ask(turn: int) -> None:
        answer = client.infer("m", [infer_input("X", pair(turn), triton_http)])
        assert answer.as_numpy("Y").tolist() == (pair(turn) + 1).tolist()

    return ask


def ask_on_one_connection(server: RocserveProcess) -> Callable[[int], None]:
    """Plain HTTP: the client connects again only after an answer that says so."""
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=PATIENCE_SECONDS)
    data = {"name": "X", "shape": [1, 2], "datatype": "FP32"}

    def ask(turn: int) -> None:
        connection.request("POST", "/v2/models/m/infer", json.dumps({"inputs": [{**data, "data": [turn, 0]}]}))
        answer = connection.getresponse()
        content = answer.read()
        assert answer.status == 200, content
        assert json.loads(content)["outputs"][0]["data"] == [turn + 1, 1]

    return ask


def stream_decoupled(server: RocserveProcess) -> Callable[[int], None]:
    """A stream that stays open over all moves, and one for each turn."""
    lasting, answers = own_client(server), queue.Queue[tuple[triton.InferResult | None, Exception | None]]()
    lasting.start_stream(lambda result, error: answers.put((result, error)))

    def ask(turn: int) -> None:
        client, others = own_client(server), queue.Queue[tuple[triton.InferResult | None, Exception | None]]()
        client.start_stream(lambda result, error: others.put((result, error)))
        values = [turn, turn + 1, turn + 2]
        wanted = [
            infer_input("IN", np.array(values, np.int32)),
            infer_input("DELAY", np.array([20, 20, 20], np.uint32)),
            infer_input("WAIT", np.array([1], np.uint32)),
        ]
        for stream in (lasting, client):
            stream.async_stream_infer("repeat_int32", wanted)
        for came in (answers, others):
            for value in values:
                result, error = came.get(timeout=PATIENCE_SECONDS)
                assert error is None
                assert result is not None
                assert result.as_numpy("OUT").tolist() == [value]
        client.stop_stream()
        client.close()

    return ask


def run_sequences(server: RocserveProcess, which: int) -> Callable[[int], None]:
    client = own_client(server)

    def ask(turn: int) -> None:
        sequence_id = 1 + which + 4 * turn
        assert run_sequence(client, "sums", sequence_id, [turn, 1, 2, 3]) == [turn, turn + 1, turn + 3, turn + 6]

    return ask


def ask_in_shared_memory(server: RocserveProcess, memory: SharedFile) -> Callable[[int], None]:
    client = own_client(server)
    client.register_system_shared_memory("moved", memory.key, 64)

    def ask(turn: int) -> None:
        memory.put(0, pair(turn).tobytes())
        entry, output = triton.InferInput("X", [1, 2], "FP32"), triton.InferRequestedOutput("Y")
        entry.set_shared_memory("moved", 8)
        output.set_shared_memory("moved", 8, 16)
        client.infer("m", [entry], outputs=[output])
        assert np.frombuffer(memory.get(16, 8), np.float32).tolist() == (pair(turn) + 1)[0].tolist()

    return ask


def test_front_ends_come_and_go_and_no_client_notices(server: RocserveProcess) -> None:
    clients = Clients()
    states: queue.Queue[int | grpc.RpcError] = queue.Queue()
    with shared_file(64, "moves") as memory, grpc.insecure_channel(server.address) as channel:
        watch = channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )(health_pb2.HealthCheckRequest(service="simple"))

        def follow() -> None:
            try:
                for answer in watch:
                    states.put(answer.status)
            except grpc.RpcError as error:
                states.put(error)

        threading.Thread(target=follow, daemon=True).start()
        assert states.get(timeout=PATIENCE_SECONDS) == health_pb2.HealthCheckResponse.SERVING
        for number in range(2):
            clients.repeat(f"gRPC {number}", ask_over_grpc(server))
            clients.repeat(f"HTTP {number}", ask_over_http(server))
            clients.repeat(f"connection {number}", ask_on_one_connection(server))
            clients.repeat(f"sequences {number}", run_sequences(server, number))
        clients.repeat("streams", stream_decoupled(server))
        clients.repeat("shared memory", ask_in_shared_memory(server, memory))
        with clients.asking():
            for move in range(1, MOVES + 1):
                for line in (COME, GO):
                    wait_until(
                        lambda line=line, move=move: clients.errors or server.log_text.count(line) >= move,
                        f"move {move}: {line}",
                    )
                    clients.wait_for_turns()
            assert states.empty(), "the watch has ended, or has seen a change"
        assert clients.errors == []
        server.client().update_log_settings({"log_verbose_level": 0})
        check_counters(server, clients)
        with suppress(grpc.RpcError):
            watch.cancel()
    assert server.log_text.count(" has ended (") == 0, "a front end has died"


def check_counters(server: RocserveProcess, clients: Clients) -> None:
    """The counters are the server's, whichever process has served the requests."""
    of_m = sum(turns for name, turns in clients.turns.items() if name[:4] in ("gRPC", "HTTP", "conn", "shar"))
    (row,) = server.client().get_inference_statistics("m").model_stats
    assert row.inference_stats.success.count == of_m
    assert row.inference_stats.fail.count == 0
    port = port_of(server)
    assert float(scrape(port)['nv_inference_request_success{model="m",version="1"}']) == of_m
    wait_until(
        lambda: float(scrape(port)['rocserve_request_memory_bytes{kind="request"}']) == 0, "the memory of all requests"
    )
