"""A Ray cluster of several nodes on this machine, and the application of deploy/ray in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import psutil
import yaml

from benchmarks.line_process import LineProcess
from benchmarks.server_process import free_port

_ROOT = Path(__file__).parents[1]
PYTHON = _ROOT / ".cluster-tools" / "ray" / "bin" / "python"
"""The Python for which `make cluster-tools` installs Ray and this project."""
RAY = PYTHON.with_name("ray")
_CONFIGURATION = _ROOT / "deploy" / "ray" / "rocserve.yaml"


class RayCluster(LineProcess):
    """Nodes with one CPU each, of which the first has the proxies; a context manager that ends them."""

    def __init__(self, nodes: int) -> None:
        self.raylets: list[psutil.Process] = []
        """For each node the process that has started all others."""
        self.address = f"127.0.0.1:{free_port()}"
        """The gRPC address."""
        self.http_address = f"127.0.0.1:{free_port()}"
        self._nodes = nodes
        super().__init__("the Ray cluster", [str(PYTHON), "-m", "benchmarks.ray_driver"])

    def __enter__(self) -> Self:
        super().__enter__()
        for _ in range(self._nodes):
            self.add_node()
        return self

    def add_node(self) -> None:
        self.raylets.append(psutil.Process(self._ask(node=1)["raylet"]))

    def deploy(
        self, words: Sequence[str], models_per_replica: int = 0, route_prefix: str = "/", **options: object
    ) -> None:
        """Give Serve the configuration of deploy/ray, with other arguments of `rocserve serve` and other options of its
        deployment. Does not wait until the application runs."""
        configuration = yaml.safe_load(_CONFIGURATION.read_text())
        configuration["proxy_location"] = "HeadOnly"
        configuration["http_options"] = {"host": "127.0.0.1", "port": _port(self.http_address)}
        configuration["grpc_options"]["port"] = _port(self.address)
        (application,) = configuration["applications"]
        application["args"] = {"words": list(words), "models_per_replica": models_per_replica}
        application["route_prefix"] = route_prefix
        (deployment,) = application["deployments"]
        deployment.update({"ray_actor_options": {"num_cpus": 1}, **options})
        self._ask(deploy=configuration)

    def has_healthy_proxy(self) -> bool:
        return any(proxy["status"] == "HEALTHY" for proxy in self._ask()["proxies"].values())

    def replicas(self) -> dict[str, int]:
        """The names of the running replicas, and the numbers of their processes."""
        applications = self._ask()["applications"].values()
        deployments = [deployment for told in applications for deployment in told["deployments"].values()]
        replicas = [replica for deployment in deployments for replica in deployment["replicas"]]
        return {replica["actor_name"]: int(replica["pid"]) for replica in replicas if replica["state"] == "RUNNING"}

    def _ask(self, **what: object) -> dict[str, Any]:
        return self.ask(json.dumps(what))


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])
