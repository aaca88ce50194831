"""Front ends that die, stand still, or lose their server: only their own clients notice, over gRPC and over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton
from support import http_requests
from support.certificates import make_authority
from support.front_ends import (
    KILLS,
    PAUSE_SECONDS,
    asking_clients,
    check_others_go_on,
    clients_of,
    listens,
    wait_for_more,
)
from support.gated_models import drop_gated, gate_of, none_waits, waiting
from support.infer_inputs import infer_input
from support.models import ADD_CONSTANT_CONFIG, add_constant, drop
from support.processes import wait_until_ended
from support.server import RocserveProcess, Start
from support.waiting import PATIENCE_SECONDS, wait_until
from tritonclient.utils import InferenceServerException

from benchmarks.server_process import free_port

BOTH = ("--front-ends=2", "--exit-timeout-secs=2")
FLAGS = (*BOTH, "--allow-http=false")


@pytest.fixture(scope="module")
def lasting_server(start: Start, tmp_path_factory: pytest.TempPathFactory) -> RocserveProcess:
    """A server that survives whatever happens to its front ends."""
    repository = tmp_path_factory.mktemp("front-ends") / "repository"
    drop(repository, "m", add_constant(1.0), ADD_CONSTANT_CONFIG)
    drop_gated(repository)
    return start(repository, *BOTH)


def both_listen(server: RocserveProcess) -> bool:
    front_ends = server.front_ends()
    ports = (server.port, server.http_port)
    return len(front_ends) == 2 and all(listens(one, port) for one in front_ends for port in ports)


@pytest.fixture
def server(lasting_server: RocserveProcess) -> RocserveProcess:
    wait_until(lambda: both_listen(lasting_server), "both front ends")
    return lasting_server


def own_client(server: RocserveProcess) -> triton.InferenceServerClient:
    """A client with a separate connection, and so with a random front end."""
    return triton.InferenceServerClient(server.address, channel_args=[("grpc.use_local_subchannel_pool", 1)])


class GrpcCalls:
    """Requests on one connection."""

    lost = r"\[StatusCode.UNAVAILABLE\]"
    """What a request's error says if its front end has ended."""

    def __init__(self, server: RocserveProcess) -> None:
        self._client = own_client(server)

    def ask(self, model: str, number: float) -> float:
        """The model's answer to the number. Raises RuntimeError if there is none."""
        values = infer_input("X", np.array([[number, 0]], np.float32))
        try:
            return float(self._client.infer(model, [values], client_timeout=PATIENCE_SECONDS).as_numpy("Y")[0, 0])
        except InferenceServerException as error:
            raise RuntimeError(str(error)) from error

    def close(self) -> None:
        self._client.close()


class HttpCalls:
    """As GrpcCalls."""

    lost = "^the connection has ended: "

    def __init__(self, server: RocserveProcess) -> None:
        self._client = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=PATIENCE_SECONDS)

    def ask(self, model: str, number: float) -> float:
        values = {"name": "X", "shape": [1, 2], "datatype": "FP32", "data": [number, 0]}
        try:
            self._client.request("POST", f"/v2/models/{model}/infer", json.dumps({"inputs": [values]}))
            response = self._client.getresponse()
            answer = json.loads(response.read())
        except (OSError, http.client.HTTPException) as error:
            self._client.close()
            raise RuntimeError(f"the connection has ended: {error!r}") from error
        if response.status != 200:
            raise RuntimeError(str(answer))
        return float(answer["outputs"][0]["data"][0])

    def close(self) -> None:
        self._client.close()


def own_calls(server: RocserveProcess, number: int) -> GrpcCalls | HttpCalls:
    """A new connection; every second one is over HTTP."""
    return HttpCalls(server) if number % 2 else GrpcCalls(server)


class Client:
    """Sends one request after another on one connection, and counts outcomes."""

    def __init__(self, calls: GrpcCalls | HttpCalls, number: int, stop: threading.Event) -> None:
        self.answers = 0
        self.failures: list[str] = []
        self.wrong = 0
        self._number = number * 100_000
        self.calls = calls
        self._stop = stop
        self.thread = threading.Thread(target=self._ask, daemon=True)
        self.thread.start()

    def _ask(self) -> None:
        while not self._stop.is_set():
            number = self._number + self.answers % 10_000
            try:
                self.wrong += self.calls.ask("m", number) != number + 1
            except RuntimeError as error:
                self.failures.append(str(error))
                time.sleep(0.01)
            else:
                self.answers += 1
                self._stop.wait(PAUSE_SECONDS)
        self.calls.close()


def clients(server: RocserveProcess) -> AbstractContextManager[list[Client]]:
    return asking_clients(lambda number, stop: Client(own_calls(server, number), number, stop))


def test_a_killed_front_end_takes_its_own_clients_along(server: RocserveProcess) -> None:
    process = server.server_process()
    with clients(server) as asking:
        descriptors = 0
        for turn in range(KILLS):
            for client in asking:
                client.failures.clear()
            victim = max(server.front_ends(), key=clients_of)
            hit = clients_of(victim)
            victim.kill()
            wait_until_ended([victim])
            wait_until(lambda: both_listen(server), "the new front end")
            wait_for_more(asking)
            failed = [client for client in asking if client.failures]
            # gRPC retries a request by itself if the request had not left its client.
            assert len(failed) <= hit, "others than its clients have noticed"
            for client in failed:
                assert all(re.search(client.calls.lost, failure) for failure in client.failures)
            if turn == 0:
                descriptors = process.num_fds()
        wait_until(lambda: process.num_fds() <= descriptors + 2, f"the return of all but {descriptors} descriptors")
    assert sum(client.wrong for client in asking) == 0
    assert "has ended (killed by SIGKILL)" in server.log_text
    assert len(server.workers()) == 2, "workers have died with it"


def test_what_its_clients_waited_for_is_not_run(server: RocserveProcess) -> None:
    count = 20
    gate_of(server).unlink(missing_ok=True)
    before = executed(server)

    def is_answered(number: int = 0) -> bool:
        own = own_calls(server, number)
        try:
            return own.ask("gated", 1.0) == 1.0
        except RuntimeError:
            return False
        finally:
            own.close()

    with ThreadPoolExecutor(count) as pool:
        answers = [pool.submit(is_answered, number) for number in range(count)]
        wait_until(lambda: waiting(server) == count - 1, "one request that runs, and those that wait")
        for front_end in server.front_ends():
            front_end.kill()
        assert not any(answer.result() for answer in answers)
    wait_until(lambda: none_waits(server), "the end of what waited")
    gate_of(server).touch()
    for number in (0, 1):
        wait_until(lambda number=number: is_answered(number), "an answer of the next front end")
    wait_until(lambda: both_listen(server), "both front ends")
    assert executed(server) - before < count / 2


def executed(server: RocserveProcess) -> int:
    status, told = http_requests.ask(server, "GET", "/v2/models/gated/stats")
    assert status == 200, told
    return int(told["model_stats"][0]["execution_count"])


def test_one_that_stands_still_holds_nobody_up(server: RocserveProcess) -> None:
    with clients(server) as asking:
        still, other = sorted(server.front_ends(), key=clients_of)
        assert clients_of(other), "chance gave all clients to one front end"
        check_others_go_on(asking, still, other)
        wait_for_more(asking)
        assert not any(client.failures for client in asking)


def is_ready(server: RocserveProcess) -> bool:
    with suppress(InferenceServerException):
        return bool(own_client(server).is_server_ready(client_timeout=5))
    return False


def begun(server: RocserveProcess) -> list[psutil.Process]:
    """The processes that are front ends, or are about to be."""
    with suppress(psutil.NoSuchProcess):
        children = server.server_process().children()
        return [child for child in children if "rocserve.frontends.processes.main" in child.cmdline()]
    return []


def test_one_that_dies_again_and_again_has_to_wait(server: RocserveProcess) -> None:
    before = len(server.log_text)

    def has_to_wait() -> bool:
        # Long before they listen, however slow their start is: a front end that has lived for long is restarted
        # immediately. How long the pause is depends on the deaths in the tests before.
        for front_end in begun(server):
            with suppress(psutil.NoSuchProcess):
                front_end.kill()
        return bool(re.search(r"another is started in [0-9.]+ s", server.log_text[before:]))

    wait_until(has_to_wait, "a pause before the next one")
    wait_until(lambda: both_listen(server), "the next front ends")
    wait_until(lambda: is_ready(server), "an answer")


def is_live(server: RocserveProcess) -> bool:
    with own_client(server) as client, suppress(InferenceServerException):
        return bool(client.is_server_live(client_timeout=5))
    return False


def test_one_that_dies_before_all_others_listen_is_started_again(tmp_path: Path, repository: Path) -> None:
    server = RocserveProcess([repository], *BOTH, log=tmp_path / "log")
    server.port, server.http_port = free_port(), free_port()
    server.begin(f"--grpc-port={server.port}", f"--http-port={server.http_port}")
    try:
        found: list[psutil.Process] = []

        def are_begun() -> bool:
            found[:] = begun(server)
            return len(found) == 2

        wait_until(are_begun, "the front ends")
        late, early = found
        late.suspend()
        # The front end has answered this, so the server knows that it listens.
        wait_until(lambda: is_live(server), "one that serves")
        early.kill()
        end = re.compile(r"front end [01] has ended \(killed by SIGKILL\)")
        wait_until(lambda: end.search(server.log_text), "its end in the log")
        late.resume()
        wait_until(lambda: both_listen(server), "both")
        # The server's end does not wait for one that stands still.
        front_ends = server.front_ends()
        front_ends[0].suspend()
        assert server.terminate() == 0
        assert "did not end in time and is killed" in server.log_text
        wait_until_ended(front_ends)
    finally:
        server.kill()


def test_one_that_cannot_listen_says_why_and_comes_once_it_can(tmp_path: Path, repository: Path) -> None:
    authority = make_authority(tmp_path / "authority")
    files = (f"--grpc-server-cert={authority.certificate}", f"--grpc-server-key={authority.key}")
    good = authority.certificate.read_bytes()
    flags = (*BOTH, "--grpc-use-ssl=true", "--http-use-ssl=true", *files)
    with RocserveProcess([repository], *flags, log=tmp_path / "tls.log") as server:
        ports = (server.port, server.http_port)
        authority.certificate.write_text("nonsense")
        first, second = server.front_ends()
        first.kill()
        wait_until(lambda: "has ended (exit status 0: cannot serve HTTP with TLS" in server.log_text, "the reason")
        assert "; cannot serve gRPC with TLS" in server.log_text
        assert all(listens(second, port) for port in ports)
        authority.certificate.write_bytes(good)

        def all_listen() -> bool:
            return first not in server.front_ends() and all(
                [listens(one, port) for one in server.front_ends()] == [True, True] for port in ports
            )

        wait_until(all_listen, "both front ends on both ports")


def test_a_port_that_somebody_else_has_is_an_error(tmp_path: Path, repository: Path) -> None:
    with socket.socket() as other:
        # Several servers share the port if they ask for it.
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        refused = serve_on(repository, port)
        assert refused.returncode == 1
        assert f"cannot serve gRPC at 127.0.0.1:{port}: Address already in use" in refused.stderr
        with RocserveProcess(
            [repository], *FLAGS, f"--grpc-port={port}", "--reuse-grpc-port", log=tmp_path / "shared.log"
        ) as shared:
            assert shared.port == port
            assert all(listens(one, port) for one in shared.front_ends())


def serve_on(repository: Path, port: int) -> subprocess.CompletedProcess[str]:
    flags = ("--allow-http=false", "--allow-metrics=false", "--front-ends=2")
    return subprocess.run(
        [
            *(sys.executable, "-m", "rocserve.cli", "serve", f"--model-repository={repository}"),
            *(*flags, "--grpc-address=127.0.0.1", f"--grpc-port={port}"),
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
        env={**os.environ, "TRITON_SERVER_ESCAPE_LOG_MESSAGES": "0"},
    )
