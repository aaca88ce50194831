"""The process that holds a Ray cluster of several nodes on one machine. Runs in the environment that has Ray.

It answers lines of JSON: `{"node": CPUS}` adds a node and answers with its process number, `{"deploy": CONFIGURATION}`
does what `serve run` does with a file, `{}` returns the state of Serve's applications as `GET /api/serve/applications/`
of the dashboard does. It ends with its input.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

OBJECT_STORE_BYTES = 80 << 20
"""For each node; Ray needs at least 75 MiB. Serve's requests are not stored there."""
MISSED_CHECKS = 20
"""Health checks, a second apart, after which a node counts as dead. A busy machine may stand for some of them."""
NODE_SECONDS = 300.0
"""Limit of a node's start. Ray gives it 30 s, which a busy machine may need."""


class Driver:
    def __init__(self, folder: str) -> None:
        from ray._private import services
        from ray.cluster_utils import Cluster

        services.get_node = partial(_wait_for_node, services.get_node)
        # Nobody reads the logs on the driver, and no node comes by itself.
        self._shared = {
            "object_store_memory": OBJECT_STORE_BYTES,
            "temp_dir": folder,
            "include_dashboard": False,
            "include_log_monitor": False,
            "no_monitor": True,
        }
        self._cluster = Cluster()
        self._client: Any = None

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        if "node" in asked:
            return {"raylet": self._add_node(asked["node"])}
        if "deploy" in asked:
            self._deploy(asked["deploy"])
            return {}
        details: dict[str, Any] = json.loads(json.dumps(self._client.get_serve_details(), default=str))
        return details

    def close(self) -> None:
        import ray

        ray.shutdown()
        self._cluster.shutdown()

    def _add_node(self, cpus: int) -> int:
        system = {
            "health_check_initial_delay_ms": 0,
            "health_check_period_ms": 1000,
            "health_check_failure_threshold": MISSED_CHECKS,
            # Only Serve's actors run here, each in its own process.
            "enable_worker_prestart": False,
            "prestart_worker_first_driver": False,
        }
        head = {} if self._cluster.head_node else {"_system_config": system}
        node = self._cluster.add_node(num_cpus=cpus, **head, **self._shared)
        (raylet,) = node.all_processes["raylet"]
        return int(raylet.process.pid)

    def _deploy(self, configuration: dict[str, Any]) -> None:
        import ray
        from ray import serve
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        schema = ServeDeploySchema.model_validate(configuration)
        if self._client is None:
            ray.init(self._cluster.address, log_to_driver=False)
            try:
                serve.start(schema.proxy_location, schema.http_options.model_dump(), schema.grpc_options.model_dump())
            except ray.exceptions.RayActorError:
                # On a busy machine a proxy is not ready within the 15 s that Serve's controller allows. The controller
                # has then started another one, with a longer limit; `start` waited for the first.
                pass
            self._client = _get_global_client()
        self._client.deploy_apps(schema)


def _wait_for_node(get_node: Callable[..., Any], *arguments: object) -> Any:
    """Ask for a node until it is known. Raises RuntimeError after NODE_SECONDS."""
    end = time.monotonic() + NODE_SECONDS
    while True:
        try:
            return get_node(*arguments)
        except RuntimeError:
            if time.monotonic() > end:
                raise
        time.sleep(0.5)


def main() -> None:
    # Ray prints as well, so the answers go to a copy of standard output.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        # Ray records its newest cluster there, too, and needs the folder.
        os.environ["RAY_TMPDIR"] = folder
        own = Path(folder, "ray")
        own.mkdir()
        driver = Driver(str(own))
        try:
            for line in sys.stdin:
                print(json.dumps(driver.answer(json.loads(line))), file=answers)
        finally:
            driver.close()


if __name__ == "__main__":
    main()
