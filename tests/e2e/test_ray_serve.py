"""Servers as the replicas of a Ray Serve application, in a real cluster of several nodes on this machine. The tests
share the cluster and run in order; the last one removes a node."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.grpc
import tritonclient.http
from support.load import ConstantLoad
from support.models import answering, drop
from support.processes import command_of, has_ended, send
from support.waiting import PATIENCE_SECONDS, wait_until
from tritonclient.utils import InferenceServerException

from benchmarks.ray_cluster import PYTHON, RAY, RayCluster

CONFIG = """
backend: "python"
input { name: "X" data_type: TYPE_FP32 dims: [ 1, 2 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 1, 2 ] }
"""
RETRIED = ("StatusCode.UNAVAILABLE", "StatusCode.INTERNAL")
"""INTERNAL is what Serve's proxy answers for a replica that has died."""
SCALING = {
    "min_replicas": 1,
    "max_replicas": 2,
    "target_ongoing_requests": 1000,  # The queues decide.
    "upscale_delay_s": 0,
    "downscale_delay_s": 5,
    "metrics_interval_s": 0.2,
    "look_back_period_s": 2,
    "policy": {"policy_function": "rocserve.ray.autoscaling:QueuePolicy", "policy_kwargs": {"queued": 2}},
}


def adding(constant: int) -> str:
    """Slow: a few requests are a queue, and no clients keep the processors busy."""
    return answering("X", "Y", f"x + {constant}", "time.sleep(0.4 * len(requests))")


def deploy(cluster: RayCluster, repository: Path, **scaling: object) -> None:
    cluster.deploy(
        [str(repository), "--load-model=plus"],
        models_per_replica=2,
        route_prefix="/models",
        autoscaling_config={**SCALING, **scaling},
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=1,
    )


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two repositories. In the second one `plus` adds 2."""
    first, second = (tmp_path_factory.mktemp("models") for _ in range(2))
    drop(first, "plus", adding(1), CONFIG)
    drop(second, "plus", adding(2), CONFIG)
    for constant, name in enumerate(("ten", "eleven", "twelve"), 10):
        drop(first, name, adding(constant), CONFIG)
    return first, second


def need_ray() -> None:
    if not RAY.exists():
        pytest.skip("no Ray here: it comes by make cluster-tools")


@pytest.fixture(scope="module")
def cluster(repositories: tuple[Path, Path]) -> Iterator[RayCluster]:
    need_ray()
    with RayCluster(nodes=2) as cluster:
        deploy(cluster, repositories[0])
        wait_until(cluster.replicas, "a replica")
        wait_until(cluster.has_healthy_proxy, "a proxy")
        yield cluster


def x(protocol: type[tritonclient.grpc.InferInput | tritonclient.http.InferInput]) -> list[object]:
    entry = protocol("X", [1, 2], "FP32")
    entry.set_data_from_numpy(np.zeros((1, 2), np.float32))
    return [entry]


def test_grpc_goes_through_to_the_server_and_so_do_its_refusals(cluster: RayCluster) -> None:
    with tritonclient.grpc.InferenceServerClient(cluster.address) as client:
        assert client.is_server_ready()
        assert client.get_model_metadata("plus").platform == "python"
        assert client.infer("plus", x(tritonclient.grpc.InferInput)).as_numpy("Y").tolist() == [[1, 1]]
        with pytest.raises(InferenceServerException, match="unknown model: 'none'") as refused:
            client.infer("none", x(tritonclient.grpc.InferInput))
        assert refused.value.status() == "StatusCode.NOT_FOUND"
        # Serve's clients are on other machines than the server, even if its proxy is not.
        with pytest.raises(InferenceServerException, match="RepositoryModelUnload is an admin call"):
            client.unload_model("plus")


def test_a_stream_goes_through_in_both_directions(cluster: RayCluster) -> None:
    answers: queue.Queue[tuple[object, object]] = queue.Queue()
    with tritonclient.grpc.InferenceServerClient(cluster.address) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for name in ("plus", "none", "plus"):
            client.async_stream_infer(name, x(tritonclient.grpc.InferInput))
            result, error = answers.get(timeout=PATIENCE_SECONDS)
            if name == "plus":
                assert result.as_numpy("Y").tolist() == [[1, 1]]
            else:
                assert "unknown model: 'none'" in str(error)


def test_http_goes_through_to_the_server_and_so_do_its_refusals(cluster: RayCluster) -> None:
    with tritonclient.http.InferenceServerClient(f"{cluster.http_address}/models") as client:
        assert client.is_server_ready()
        assert client.get_model_metadata("plus")["platform"] == "python"
        for compression in (None, "gzip"):
            answer = client.infer(
                "plus",
                x(tritonclient.http.InferInput),
                request_compression_algorithm=compression,
                response_compression_algorithm=compression,
            )
            assert answer.as_numpy("Y").tolist() == [[1, 1]]
        with urllib.request.urlopen(f"http://{cluster.http_address}/models/v2/models/plus?a=b") as answer:
            assert json.loads(answer.read())["name"] == "plus"
            assert answer.headers.get_all("Server") == ["uvicorn"]
        with pytest.raises(InferenceServerException, match="unknown model: 'none'"):
            client.infer("none", x(tritonclient.http.InferInput))
        with pytest.raises(InferenceServerException, match="RepositoryModelUnload is an admin call"):
            client.unload_model("plus")


def test_models_are_loaded_by_their_multiplexed_ids_and_those_not_asked_for_go(cluster: RayCluster) -> None:
    with (
        tritonclient.grpc.InferenceServerClient(cluster.address) as client,
        tritonclient.http.InferenceServerClient(f"{cluster.http_address}/models") as http,
    ):
        for name, constant in (("ten", 10), ("eleven", 11), ("twelve", 12), ("ten", 10)):
            answer = client.infer(name, x(tritonclient.grpc.InferInput), headers={"multiplexed_model_id": name})
            assert answer.as_numpy("Y").tolist() == [[constant, constant]]
        headers = {"serve_multiplexed_model_id": "twelve"}
        assert http.infer("twelve", x(tritonclient.http.InferInput), headers=headers).as_numpy("Y")[0, 0] == 12
        # Two models a replica at most; the model that is loaded from the start does not count.
        assert not client.is_model_ready("eleven")
        assert client.is_model_ready("plus")
        with pytest.raises(InferenceServerException, match="'thirteen'"):
            client.infer("thirteen", x(tritonclient.grpc.InferInput), headers={"multiplexed_model_id": "thirteen"})
        with pytest.raises(InferenceServerException, match="'thirteen'"):
            http.infer("plus", x(tritonclient.http.InferInput), headers={"serve_multiplexed_model_id": "thirteen"})


def test_replicas_come_and_go_and_no_request_is_lost(cluster: RayCluster, repositories: tuple[Path, Path]) -> None:
    constants = {1.0, 2.0}
    with (
        ConstantLoad(cluster.address, "plus", constants, threads=8, retried=RETRIED) as patient,
        ConstantLoad(cluster.address, "plus", constants, threads=2) as hasty,
    ):
        wait_until(lambda: len(cluster.replicas()) == 2, "two replicas, by the queue of one")
        assert not patient.failures + hasty.failures

        outdated = {*cluster.replicas()}
        deploy(cluster, repositories[1])
        wait_until(lambda: has_only_new({*cluster.replicas()}, outdated), "the update of all replicas")
        patient.wait_until_answered_by(2.0, times=20)
        assert not patient.failures + hasty.failures

        lost, servers = kill_a_node(cluster)
        wait_until(lambda: lost.isdisjoint(cluster.replicas()), "the end of the replica")
        wait_until(lambda: all(has_ended(server.pid) for server in servers), "the end of its server")
        patient.wait_until_answered_by(2.0, times=20)
    assert {status for status, _ in hasty.failures} <= {*RETRIED}, "what was in flight"
    assert not patient.failures
    assert not patient.wrong + hasty.wrong
    wait_until(lambda: len(cluster.replicas()) == 1, "one replica, without load")


STARTING = """
import asyncio, os, signal, sys
from rocserve.ray.application import ServerProcess

async def main():
    try:
        await ServerProcess.start([sys.argv[1] + "/none"])
    except RuntimeError as error:
        print("told:", error)
    server = await ServerProcess.start([sys.argv[1]])
    await server.check()
    print("told:", await server.pending_requests())
    os.kill(server.pid, signal.SIGKILL)
    text = ""
    while "ended" not in text:
        try:
            await server.check()
        except RuntimeError as error:
            text = str(error)
    print("told:", text)
    await server.end()

asyncio.run(main())
"""


def test_the_replica_reports_a_server_that_does_not_start_or_dies(repositories: tuple[Path, Path]) -> None:
    need_ray()
    command = (str(PYTHON), "-c", STARTING, str(repositories[1]))
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    unready, pending, dead = [line.removeprefix("told: ") for line in printed if line.startswith("told: ")]
    assert "ended with status 2 before it was ready" in unready
    assert pending == "0.0"
    assert dead == "the server has ended with status -9"


def has_only_new(replicas: set[str], outdated: set[str]) -> bool:
    """Not "two new ones": by then a busy machine's clients may send so few requests that Serve takes one away."""
    return bool(replicas) and not replicas & outdated


def kill_a_node(cluster: RayCluster) -> tuple[set[str], list[psutil.Process]]:
    """Kill a node with a running replica, and Ray's processes on it, as a power cut does. Returns the replica's name,
    and the servers' processes, which are left. Serve chooses the nodes of its replicas, and may move them at any time;
    the first node has the proxies."""
    while True:
        running = cluster.replicas()
        for node in cluster.raylets[1:]:
            family = node.children(recursive=True)
            lost = {name for name, process in running.items() if process in {one.pid for one in family}}
            servers = [one for one in family if "rocserve.cli" in command_of(one)]
            if lost and servers:
                cluster.raylets.remove(node)
                for process in {node, *family} - set(servers):
                    if "rocserve.workers" not in command_of(process):
                        send(process, signal.SIGKILL)
                return lost, servers
