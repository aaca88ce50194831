"""The server's memory for requests: bounded in total, and released however a request ends."""

from __future__ import annotations

import queue
import random
import socket
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import tritonclient.grpc as grpc_client
from support.metrics import FLAGS, port_of, scrape
from support.models import answering, drop
from support.server import RocserveProcess, Start
from support.stretch_model import UNTIL_RELEASED, grpc_inputs, http_request, release, stretch_values, write_stretch
from support.waiting import PATIENCE_SECONDS, wait_until
from tritonclient.utils import InferenceServerException

MIB = 1 << 20
LIMIT = 32 * MIB
CLIENTS = 12
REQUESTS = 12


# A request says how large the tensor between the ensemble's steps is.
# The second step runs once a file says so.
WEIGH = answering(
    "IN",
    "SIZE",
    "np.array([x.size], np.int32)",
    "gate = os.path.abspath(os.path.join(__file__, *[os.pardir] * 4, 'weighed'))\n"
    "while not os.path.exists(gate):\n    time.sleep(0.01)",
)
WEIGH_CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_UINT8 dims: [ -1 ] }
output { name: "SIZE" data_type: TYPE_INT32 dims: [ 1 ] }
"""
CHAIN_CONFIG = """
platform: "ensemble"
input { name: "X" data_type: TYPE_INT32 dims: [ -1 ] }
output { name: "SIZE" data_type: TYPE_INT32 dims: [ 1 ] }
ensemble_scheduling {
  step { model_name: "stretch" input_map { key: "X" value: "X" } output_map { key: "Y" value: "y" } }
  step { model_name: "weigh" input_map { key: "IN" value: "y" } output_map { key: "SIZE" value: "SIZE" } }
}
"""


@pytest.fixture(scope="module")
def server(start: Start, tmp_path_factory: pytest.TempPathFactory) -> RocserveProcess:
    folder = tmp_path_factory.mktemp("memory")
    repository: Path = folder / "repository"
    write_stretch(repository)
    drop(repository, "weigh", WEIGH, WEIGH_CONFIG)
    drop(repository, "chain", None, CHAIN_CONFIG)
    flags = (f"--max-request-memory={LIMIT}", "--write-timeout-secs=10", *FLAGS)
    return start(repository, *flags)


def use(server: RocserveProcess) -> tuple[int, int]:
    metrics = scrape(port_of(server))
    request, answer = (metrics[f'rocserve_request_memory_bytes{{kind="{kind}"}}'] for kind in ("request", "answer"))
    return int(request), int(answer)


def wait_until_free(server: RocserveProcess) -> None:
    wait_until(lambda: use(server) == (0, 0), f"a free memory; it is {use(server)}")


def connect(server: RocserveProcess, small_window: bool = False) -> socket.socket:
    """`small_window`: the client receives little as long as it reads nothing."""
    connection = socket.socket()
    if small_window:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(PATIENCE_SECONDS)
    connection.connect(("127.0.0.1", server.http_port))
    return connection


def test_beyond_the_limit_requests_are_refused_at_once(server: RocserveProcess) -> None:
    clients = [server.client() for _ in range(5)]
    ends: queue.Queue[Exception | None] = queue.Queue()
    # Two of them run, the others wait: 30 MiB of 32.
    inputs = grpc_inputs(stretch_values(UNTIL_RELEASED, request_bytes=6 * MIB))
    for client in clients:
        client.async_infer("stretch", inputs, lambda result, error: ends.put(error))
    wait_until(lambda: use(server)[0] >= 30 * MIB, "the requests")
    with pytest.raises(
        InferenceServerException, match=r"the server's memory for requests is full: 30\.0 MiB of 32\.0"
    ) as refused:
        server.client().infer("stretch", grpc_inputs(stretch_values(request_bytes=3 * MIB)))
    assert refused.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
    with connect(server) as connection:
        connection.sendall(http_request(stretch_values(request_bytes=3 * MIB)))
        answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 503 "), answer
    # There is room for a small request next to them, and for the waiting ones.
    small: queue.Queue[tuple[grpc_client.InferResult | None, Exception | None]] = queue.Queue()
    another = server.client()
    another.async_infer(
        "stretch", grpc_inputs(stretch_values(answer_bytes=7)), lambda result, error: small.put((result, error))
    )
    release(server.repositories[0])
    result, error = small.get(timeout=PATIENCE_SECONDS)
    assert result is not None and result.as_numpy("Y").size == 7, error
    assert [ends.get(timeout=PATIENCE_SECONDS) for _ in clients] == [None] * len(clients)
    wait_until_free(server)


def test_a_request_larger_than_the_limit_is_refused_with_both_sizes(server: RocserveProcess) -> None:
    values = stretch_values(request_bytes=LIMIT + MIB)
    with pytest.raises(
        InferenceServerException, match=r"this request takes 33.0 MiB of memory, more than the 32.0 MiB"
    ):
        server.client().infer("stretch", grpc_inputs(values))
    with connect(server) as connection:
        connection.sendall(http_request(values)[: LIMIT + MIB // 2])
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")
    wait_until_free(server)


def test_an_answer_without_room_is_refused_and_its_client_told(server: RocserveProcess) -> None:
    with pytest.raises(InferenceServerException, match="this answer takes 4") as refused:
        server.client().infer("stretch", grpc_inputs(stretch_values(answer_bytes=40 * MIB)))
    assert refused.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
    with connect(server) as connection:
        connection.sendall(http_request(stretch_values(answer_bytes=40 * MIB)))
        told = connection.recv(65536)
    assert told.startswith(b"HTTP/1.1 503 ")
    assert b"ask for fewer or smaller outputs" in told
    wait_until_free(server)


def test_small_requests_that_grow_large_within_an_ensemble_are_bounded(server: RocserveProcess) -> None:
    """40 requests of 12 bytes that have 4 MiB each between the steps; the second step begins later."""
    ends: queue.Queue[str] = queue.Queue()

    def note(result: grpc_client.InferResult | None, error: InferenceServerException | None) -> None:
        ends.put(error.message() if error else str(result.as_numpy("SIZE")[0]))

    client = server.client()
    for _ in range(40):
        client.async_infer("chain", grpc_inputs(stretch_values(answer_bytes=4 * MIB)), note)
    # As many as have room wait together; the others are refused.
    room = LIMIT // 2 // (4 * MIB)
    wait_until(lambda: ends.qsize() >= 40 - room, "the refusals")
    assert 4 * MIB <= use(server)[1] <= LIMIT // 2 + MIB
    (server.repositories[0].parent / "weighed").touch()
    told = Counter(ends.get(timeout=PATIENCE_SECONDS) for _ in range(40))
    assert told.pop(str(4 * MIB)) == room
    assert list(told) == [
        "in ensemble 'chain', tensors between the steps of ensembles may take 16.0 MiB together, half of the server's"
        " memory for requests (--max-request-memory), and 4.0 MiB more are needed; send fewer or smaller requests at"
        " once, and try again later"
    ]
    wait_until_free(server)


def test_however_requests_end_the_memory_is_free_again(server: RocserveProcess) -> None:
    ends: Counter[str] = Counter()
    threads = [threading.Thread(target=misbehave, args=(server, seed, ends)) for seed in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends.total() == CLIENTS * REQUESTS, ends
    wait_until_free(server)
    # The killed workers come back, and everything is as before.
    wait_until(lambda: len(server.workers()) == 3, "all workers")
    assert server.client().infer("stretch", grpc_inputs(stretch_values(answer_bytes=5))).as_numpy("Y").size == 5
    wait_until_free(server)


def misbehave(server: RocserveProcess, seed: int, ends: Counter[str]) -> None:
    chance = random.Random(seed)
    for _ in range(REQUESTS):
        values = stretch_values(
            milliseconds=chance.choice((0, 5, 60)),
            answer_bytes=chance.choice((0, 100, MIB, 5 * MIB)),
            request_bytes=chance.choice((12, 1000, MIB, 4 * MIB)),
            crash=chance.random() < 0.05,
        )
        way = chance.choice((_unary, _cancelled, _late, _stream, _http, _half_body, _unread))
        try:
            ends[way(server, values)] += 1
        except ConnectionError:
            # The server may refuse a request before all of it is sent.
            ends["ended by the server"] += 1


def _unary(server: RocserveProcess, values) -> str:
    try:
        with server.client() as client:
            client.infer("stretch", grpc_inputs(values))
    except InferenceServerException as error:
        return f"unary {error.status()}"
    return "answered"


def _late(server: RocserveProcess, values) -> str:
    try:
        with server.client() as client:
            client.infer("stretch", grpc_inputs(values), client_timeout=0.03)
    except InferenceServerException as error:
        return f"late {error.status()}"
    return "answered in time"


def _cancelled(server: RocserveProcess, values) -> str:
    with server.client() as client:
        call = client.async_infer("stretch", grpc_inputs(values), lambda result, error: None)
        time.sleep(0.01)
        call.cancel()
    return "cancelled"


def _stream(server: RocserveProcess, values) -> str:
    answers: queue.Queue[object] = queue.Queue()
    with grpc_client.InferenceServerClient(server.address) as client:
        client.start_stream(lambda result, error: answers.put(error))
        # A request without room ends the stream, and tritonclient then refuses the next one.
        with suppress(InferenceServerException):
            for _ in range(4):
                client.async_stream_infer("stretch", grpc_inputs(values))
        answers.get(timeout=PATIENCE_SECONDS)
        client.stop_stream(cancel_requests=True)
    return "stream left"


def _http(server: RocserveProcess, values) -> str:
    with connect(server) as connection:
        connection.sendall(http_request(values, Connection="close"))
        answer = b""
        while part := connection.recv(MIB):
            answer += part
    return f"HTTP {answer[9:12].decode()}"


def _half_body(server: RocserveProcess, values) -> str:
    request = http_request(values)
    with connect(server) as connection:
        connection.sendall(request[: len(request) * 2 // 3])
        time.sleep(0.02)
    return "half a body"


def _unread(server: RocserveProcess, values) -> str:
    with connect(server) as connection:
        connection.sendall(http_request(values))
        time.sleep(0.1)
    return "left without reading"


def test_http_answers_that_nobody_reads_are_bounded_and_given_up(server: RocserveProcess) -> None:
    with ExitStack() as clients:
        connections = [clients.enter_context(connect(server, small_window=True)) for _ in range(20)]
        for connection in connections:
            connection.sendall(http_request(stretch_values(answer_bytes=8 * MIB)))
        # Four of them have room; the others are refused with that reason.
        wait_until(lambda: use(server)[1] >= 24 * MIB, "answers that wait to be read")
        assert use(server)[1] <= LIMIT
        heads = [connection.recv(12) for connection in connections]
        assert set(heads) == {b"HTTP/1.1 200", b"HTTP/1.1 503"}
        # The connections are open; --write-timeout-secs has passed.
        wait_until_free(server)
    with server.client() as client:
        assert client.infer("stretch", grpc_inputs(stretch_values(answer_bytes=5))).as_numpy("Y").size == 5
