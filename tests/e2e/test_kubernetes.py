"""deploy/kustomize: its objects against the schemas of their kinds, its rules with promtool, its pod on an OCI runtime,
and its metric queries on a Prometheus that scrapes that pod."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton
import yaml
from support.infer_inputs import infer_input
from support.manifests import DEPLOY, objects, rendered, the
from support.migraphx import CHECKOUT
from support.models import add_constant, drop
from support.pod import Pod, require_containers
from support.stores import TOOLS, tool
from support.waiting import PATIENCE_SECONDS, wait_until
from tritonclient.utils import InferenceServerException


def program(name: str) -> str:
    """prometheus or promtool. The test skips without it."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} here: apt-get install prometheus")
    return found


class Prometheus:
    """A context manager: a Prometheus that scrapes and evaluates each second."""

    def __init__(self, targets: Mapping[str, Mapping[str, str]], rules: Mapping[str, Any], folder: Path) -> None:
        """`targets`: an address -> the labels that the Prometheus Operator gives; `rules`: the spec of a
        PrometheusRule; `folder`: empty, for its files."""
        self._folder = folder
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None
        (folder / "rules.yaml").write_text(yaml.safe_dump(rules))
        configuration = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yaml"],
            "scrape_configs": [
                {
                    "job_name": "rocserve",
                    "static_configs": [
                        {"targets": [target], "labels": dict(labels)} for target, labels in targets.items()
                    ],
                }
            ],
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(configuration))

    def __enter__(self) -> Self:
        command = [
            program("prometheus"),
            f"--config.file={self._folder}/prometheus.yaml",
            f"--storage.tsdb.path={self._folder}/data",
            "--web.listen-address=127.0.0.1:0",
        ]
        with (self._folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_until(self._is_ready, f"Prometheus; {self._folder}/prometheus.log says why")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(PATIENCE_SECONDS)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The current series, without those whose value is not a number."""
        words = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self._port}/api/v1/query?{words}", timeout=PATIENCE_SECONDS
        ) as answer:
            series = json.load(answer)["data"]["result"]
        return [one for one in series if one["value"][1] != "NaN"]

    def _is_ready(self) -> bool:
        assert self._process is not None
        listening = [
            one.laddr.port
            for one in psutil.Process(self._process.pid).net_connections("tcp")
            if one.status == psutil.CONN_LISTEN
        ]
        if not listening:
            return False
        (self._port,) = listening
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


OVERLAYS = ("cpu", "rocm")
MONITORING = DEPLOY / "kustomize/components/monitoring"
LABELS = {"namespace": "serving", "service": "rocserve", "pod": "rocserve-0"}
KINDS_OF_OTHERS = {"keda.sh/v1alpha1": "keda", "monitoring.coreos.com/v1": "prometheus-operator"}
VALIDATE = """
import { readFileSync } from "fs";
for (const [name, object] of JSON.parse(readFileSync(0))) {
  const kinds = await import(`@kubernetes-models/${name}/${object.apiVersion}`);
  new kinds[object.kind](object).validate();
}
"""
SLOW = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        (request,) = requests
        time.sleep(0.2)
        values = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
        if values[0] < 0:
            raise ValueError("no such thing")
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", values[:1])])]
"""
SLOW_CONFIG = """
backend: "python"
input { name: "X" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }
"""
SOONER = ("--drain-seconds=15", "--max-connection-age-secs=4")
CLIENTS = 8
ELEMENTS = 115_000
"""460 KB: the clients' concurrent requests take 88 % of --max-request-memory=4 MiB."""


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_objects_are_as_their_schemas_have_them(overlay: str) -> None:
    text = rendered(f"kustomize/overlays/{overlay}")
    found = objects(text)
    others = [(KINDS_OF_OTHERS[one["apiVersion"]], one) for one in found if one["apiVersion"] in KINDS_OF_OTHERS]
    own = yaml.safe_dump_all([one for one in found if one["apiVersion"] not in KINDS_OF_OTHERS])
    assert len(found) == 9
    validate = tool("venv/bin/kubernetes-validate")
    ran = subprocess.run([validate, "--strict", "-"], input=own, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
    assert ran.stdout.count(" passed for resource ") == len(found) - len(others)
    tool("node_modules/@kubernetes-models")
    node = subprocess.run(
        ["node", "--input-type=module", "-e", VALIDATE],
        cwd=TOOLS,
        input=json.dumps(others),
        capture_output=True,
        text=True,
        check=False,
    )
    assert node.returncode == 0, node.stderr
    assert len(others) == (2 if overlay == "cpu" else 3)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_models_in_an_image(overlay: str, tmp_path: Path) -> None:
    parts = {
        "resources": [DEPLOY / "kustomize/overlays" / overlay],
        "components": [DEPLOY / "kustomize/components/model-image"],
    }
    own = {kind: [os.path.relpath(folder, tmp_path) for folder in folders] for kind, folders in parts.items()}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(own))
    found = [one for one in objects(rendered(str(tmp_path))) if one["kind"] in ("Deployment", "StatefulSet")]
    (workload,) = found
    before, after = (
        {volume["name"]: volume for volume in one["spec"]["template"]["spec"]["volumes"]}
        for one in (the(workload["kind"], rendered(f"kustomize/overlays/{overlay}")), workload)
    )
    image = {"reference": "registry.example.com/models:1", "pullPolicy": "IfNotPresent"}
    assert after == {**before, "models": {"name": "models", "image": image}}
    validate = [tool("venv/bin/kubernetes-validate"), "--strict", "-"]
    ran = subprocess.run(validate, input=yaml.safe_dump_all(found), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_names_other_objects_names_some_that_are_there(overlay: str) -> None:
    found = objects(rendered(f"kustomize/overlays/{overlay}"))
    (workload,) = [item for item in found if item["kind"] in ("Deployment", "StatefulSet")]
    (scaler,) = [item for item in found if item["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")]
    assert scaler["spec"]["scaleTargetRef"] == {
        "apiVersion": workload["apiVersion"],
        "kind": workload["kind"],
        "name": workload["metadata"]["name"],
    }
    assert "replicas" not in workload["spec"]
    labels = {"matchLabels": workload["spec"]["template"]["metadata"]["labels"]}
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    ports = {port["name"] for port in container["ports"]}
    for item in found:
        if item["kind"] == "Service":
            assert {"matchLabels": item["spec"]["selector"]} == labels
            assert {port["targetPort"] for port in item["spec"]["ports"]} <= ports
        elif item["kind"] in ("PodDisruptionBudget", "NetworkPolicy"):
            assert labels in (item["spec"].get("selector"), item["spec"].get("podSelector"))
        elif item["kind"] == "ServiceMonitor":
            scraped = [one for one in found if one["metadata"].get("labels", {}).get("rocserve/scraped") == "true"]
            assert [one["metadata"]["name"] for one in scraped] == [LABELS["service"]]
    arguments = dict(word.lstrip("-").split("=") for word in container["args"])
    ends = int(arguments["drain-seconds"]) + int(arguments["exit-timeout-secs"])
    assert ends < workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert 1.1 * int(arguments["max-connection-age-secs"]) < ends


def test_the_rules_are_as_prometheus_has_them(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules()))
    shutil.copy(CHECKOUT / "tests/data/prometheus/alerts_test.yaml", tmp_path)
    for command in (["check", "rules", "rules.yaml"], ["test", "rules", "alerts_test.yaml"]):
        ran = subprocess.run([program("promtool"), *command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr


def rules() -> dict[str, Any]:
    (rule,) = objects((MONITORING / "rules.yaml").read_text())
    return dict(rule["spec"])


def pod_spec() -> dict[str, Any]:
    return dict(the("Deployment", rendered("kustomize/overlays/cpu"))["spec"]["template"]["spec"])


@dataclass(frozen=True, slots=True)
class Monitored:
    pod: Pod
    models: Path
    prometheus: Prometheus


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitored]:
    """A pod under more load than it can serve, and the Prometheus that scrapes it."""
    require_containers()
    program("prometheus")
    folder = tmp_path_factory.mktemp("pod")
    models = folder / "models"
    drop(models, "slow", SLOW, SLOW_CONFIG)
    (folder / "prometheus").mkdir()
    stop = threading.Event()
    with Pod(pod_spec(), models, "/models", folder, "--max-request-memory=4194304") as pod:
        pod.wait_until_ready()
        threads = [threading.Thread(target=ask, args=(pod, stop, number % 4 == 0)) for number in range(CLIENTS)]
        target = f"127.0.0.1:{pod.ports['metrics']}"
        with Prometheus({target: LABELS}, rules(), folder / "prometheus") as prometheus:
            for thread in threads:
                thread.start()
            yield Monitored(pod, models, prometheus)
            stop.set()
            for thread in threads:
                thread.join()


def ask(pod: Pod, stop: threading.Event, wrongly: bool) -> None:
    entry = infer_input("X", np.full(ELEMENTS, -1 if wrongly else 1, np.float32))
    with triton.InferenceServerClient(f"127.0.0.1:{pod.ports['grpc']}") as client:
        while not stop.is_set():
            with suppress(InferenceServerException):
                client.infer("slow", [entry])


def test_every_alert_is_raised_by_what_it_is_for(monitored: Monitored) -> None:
    drop(monitored.models, "broken", b"no model")
    for killed in range(4):
        wait_until(lambda killed=killed: restarts(monitored.prometheus) == [str(killed)], f"{killed} restarts")
        if killed < 3:
            wait_until(lambda: len(monitored.pod.workers("slow")) == 1, "another worker")
            for worker in monitored.pod.workers("slow"):
                worker.kill()
    expected = {rule["alert"] for group in rules()["groups"] for rule in group["rules"] if "alert" in rule}
    for alert in expected:
        wait_until(lambda alert=alert: monitored.prometheus.query(f'ALERTS{{alertname="{alert}"}}'), alert)


def restarts(prometheus: Prometheus) -> list[str]:
    return [one["value"][1] for one in prometheus.query('rocserve_worker_restarts_total{model="slow"}')]


def test_every_query_has_data(monitored: Monitored) -> None:
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    for name, value in (("$namespace", LABELS["namespace"]), ("$model", ".+"), ("$__rate_interval", "1m")):
        queries = [query.replace(name, value) for query in queries]
    scaled = the("ScaledObject", rendered("kustomize/overlays/rocm"))["spec"]["triggers"]
    queries += [trigger["metadata"]["query"] for trigger in scaled]
    pods = the("HorizontalPodAutoscaler", rendered("kustomize/overlays/cpu"))["spec"]["metrics"]
    # As prometheus-adapter asks for a metric of pods.
    asked = 'sum by (pod) ({}{{namespace="serving", pod=~"rocserve-0"}})'
    queries += [asked.format(metric["pods"]["metric"]["name"]) for metric in pods]
    # Only AMD GPUs have these.
    assert [query for query in queries if "nv_gpu_" in query] == [
        'nv_gpu_utilization{namespace="serving"}',
        'nv_gpu_memory_used_bytes{namespace="serving"} / nv_gpu_memory_total_bytes{namespace="serving"}',
    ]
    for query in queries:
        if "nv_gpu_" not in query:
            wait_until(lambda query=query: monitored.prometheus.query(query), f"data of {query}")
    # One at a time, 0.2 s each; seven wait meanwhile, though not on each scrape if the clients are slow.
    wait_until(
        lambda: monitored.prometheus.query('nv_inference_pending_request_count{model="slow"} == 7'), "seven that wait"
    )
    wait_until(lambda: monitored.prometheus.query("rocserve_requests_offered > 0.5"), "requests offered")


def test_a_pod_that_ends_loses_no_request(tmp_path: Path) -> None:
    """Clients ask the pods of a list, which a pod leaves after the probe's period, as it leaves the endpoints."""
    require_containers()
    drop(tmp_path / "models", "m", add_constant(1.0))
    with (
        Pod(pod_spec(), tmp_path / "models", "/models", folder_in(tmp_path, "a"), *SOONER) as ending,
        Pod(pod_spec(), tmp_path / "models", "/models", folder_in(tmp_path, "b")) as staying,
    ):
        for pod in (ending, staying):
            assert pod.wait_until_ready() is None
            assert pod.answers("startupProbe")
            assert pod.answers("livenessProbe")
        endpoints = [ending, staying]
        stop = threading.Event()
        failures: list[str] = []
        threads = [threading.Thread(target=follow, args=(endpoints, stop, failures)) for _ in range(4)]
        for thread in threads:
            thread.start()
        ending.signal("TERM")
        wait_until(lambda: not ending.answers("readinessProbe"), "the end of its readiness")
        assert ending.answers("livenessProbe")
        period = float(pod_spec()["containers"][0]["readinessProbe"]["periodSeconds"])
        threading.Event().wait(period)
        endpoints.remove(ending)
        assert ending.wait(PATIENCE_SECONDS) == 0, ending.log
        stop.set()
        for thread in threads:
            thread.join()
        assert failures == []


def folder_in(parent: Path, name: str) -> Path:
    (parent / name).mkdir()
    return parent / name


def follow(endpoints: list[Pod], stop: threading.Event, failures: list[str]) -> None:
    """Ask all pods of the list, one after another."""
    entry = infer_input("X", np.ones((1, 2), np.float32))
    clients: dict[int, triton.InferenceServerClient] = {}
    while not stop.is_set():
        for pod in tuple(endpoints):
            port = pod.ports["grpc"]
            client = clients.setdefault(port, triton.InferenceServerClient(f"127.0.0.1:{port}"))
            try:
                client.infer("m", [entry])
            except InferenceServerException as error:
                failures.append(str(error))
    for client in clients.values():
        client.close()
