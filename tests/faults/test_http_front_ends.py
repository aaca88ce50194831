"""Front ends of HTTP that die or stand still: only their own clients notice."""

from __future__ import annotations

import http.client
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import psutil
import pytest
from support import http_requests
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
from support.models import ADD_CONSTANT_CONFIG, add_constant, drop
from support.server import RocserveProcess, Start
from support.waiting import PATIENCE_SECONDS, wait_until


@pytest.fixture(scope="module")
def lasting_server(start: Start, tmp_path_factory: pytest.TempPathFactory) -> RocserveProcess:
    """A server that survives whatever happens to its front ends."""
    repository = tmp_path_factory.mktemp("front-ends") / "repository"
    drop(repository, "m", add_constant(1.0), ADD_CONSTANT_CONFIG)
    drop_gated(repository)
    return start(repository, "--front-ends=2", "--exit-timeout-secs=2")


@pytest.fixture
def server(lasting_server: RocserveProcess) -> RocserveProcess:
    wait_until(lambda: both_listen(lasting_server), "both front ends")
    return lasting_server


def both_listen(server: RocserveProcess) -> bool:
    return [listens(one, server.http_port) for one in server.front_ends()] == [True, True]


def body(number: float) -> bytes:
    return json.dumps({"inputs": [{"name": "X", "shape": [1, 2], "datatype": "FP32", "data": [number, 0]}]}).encode()


def infer(client: http.client.HTTPConnection, model: str, number: float) -> float:
    """The model's answer to the number. Raises OSError or http.client.HTTPException if the connection has ended."""
    client.request("POST", f"/v2/models/{model}/infer", body(number))
    response = client.getresponse()
    answer = json.loads(response.read())
    assert response.status == 200, answer
    return float(answer["outputs"][0]["data"][0])


class Client:
    """Sends one request after another on one connection, and counts outcomes."""

    def __init__(self, server: RocserveProcess, number: int, stop: threading.Event) -> None:
        self.answers = 0
        self.failures = 0
        self.wrong = 0
        self._number = number * 100_000
        self._client = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=PATIENCE_SECONDS)
        self._stop = stop
        self.thread = threading.Thread(target=self._ask, daemon=True)
        self.thread.start()

    def _ask(self) -> None:
        while not self._stop.is_set():
            number = self._number + self.answers % 10_000
            try:
                self.wrong += infer(self._client, "m", number) != number + 1
            except (OSError, http.client.HTTPException):
                self.failures += 1
                self._client.close()
                time.sleep(0.01)
            else:
                self.answers += 1
                self._stop.wait(PAUSE_SECONDS)
        self._client.close()


def clients(server: RocserveProcess) -> AbstractContextManager[list[Client]]:
    return asking_clients(lambda number, stop: Client(server, number, stop))


def wait_for_both(server: RocserveProcess, gone: psutil.Process) -> None:
    wait_until(lambda: gone not in server.front_ends() and both_listen(server), "both front ends")


def test_a_killed_front_end_takes_its_own_clients_along(server: RocserveProcess) -> None:
    assert server.process is not None
    process = psutil.Process(server.process.pid)
    descriptors = 0
    with clients(server) as asking:
        for turn in range(KILLS):
            for client in asking:
                client.failures = 0
            victim = max(server.front_ends(), key=clients_of)
            hit = clients_of(victim)
            victim.kill()
            wait_for_both(server, victim)
            wait_for_more(asking)
            assert sum(client.failures > 0 for client in asking) <= hit, "others than its clients have noticed"
            if turn == 0:
                descriptors = process.num_fds()
        wait_until(lambda: process.num_fds() <= descriptors + 2, "the return of its descriptors")
    assert sum(client.wrong for client in asking) == 0
    assert "has ended (killed by SIGKILL)" in server.log_text
    assert len(server.workers()) == 2, "workers have died with it"


def test_what_its_clients_waited_for_is_not_run(server: RocserveProcess) -> None:
    count = 20

    def ask(_: int) -> bool:
        client = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=PATIENCE_SECONDS)
        try:
            return infer(client, "gated", 1.0) == 1.0
        except (OSError, http.client.HTTPException):
            return False
        finally:
            client.close()

    with ThreadPoolExecutor(count) as pool:
        answers = [pool.submit(ask, number) for number in range(count)]
        wait_until(lambda: waiting(server) == count - 1, "one request that runs, and those that wait")
        for front_end in server.front_ends():
            front_end.kill()
        assert not any(answer.result() for answer in answers)
    wait_until(lambda: none_waits(server), "the end of what waited")
    gate_of(server).touch()
    wait_until(lambda: ask(0), "an answer of the next front end")
    # gRPC's port may open later.
    status, told = http_requests.ask(server, "GET", "/v2/models/gated/stats")
    assert (status, [row["execution_count"] < count / 2 for row in told["model_stats"]]) == (200, [True]), told


def test_one_that_stands_still_holds_nobody_up(server: RocserveProcess) -> None:
    with clients(server) as asking:
        still, other = sorted(server.front_ends(), key=clients_of)
        assert clients_of(other), "chance gave all clients to one front end"
        check_others_go_on(asking, still, other)
        wait_for_more(asking)
        assert not any(client.failures for client in asking)
