"""deploy/kserve, with KServe's own Python clients and types from a separate environment."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.manifests import DEPLOY, objects, read, rendered, the
from support.migraphx import CHECKOUT
from support.models import add_constant, drop
from support.pod import Pod, require_containers
from support.server import RocserveProcess
from support.waiting import PATIENCE_SECONDS, wait_until

from benchmarks.environments import CACHE, PYTHON_VERSION, Environment, PeerUnavailable

SUPPORT = Path(__file__).parents[1] / "support"
SAMPLE = CHECKOUT / "model_repository"
EXAMPLE = CHECKOUT / "clients/examples/kserve_numbers.py"
JPEG = CHECKOUT / "tests/data/digits/0002_two.jpg"
EXAMPLES = sorted((DEPLOY / "kserve/examples").iterdir())


@pytest.fixture(scope="module")
def kserve() -> Environment:
    environment = Environment(CACHE / "kserve-peer" / f"python{PYTHON_VERSION}")
    try:
        environment.provision(["kserve==0.21.0"])
    except PeerUnavailable as error:
        pytest.skip(f"no kserve here: {error}")
    return environment


@dataclass(frozen=True, slots=True)
class Question:
    grpc_address: str
    http_address: str
    model: str
    data: Path


def answers(kserve: Environment, *questions: Question) -> list[Mapping[str, Any]]:
    """The models' answers to KServe's clients, which are the same over REST and gRPC."""
    words = [word for one in questions for word in (one.grpc_address, one.http_address, one.model, one.data)]
    ran = subprocess.run(
        [kserve.programs / "python", SUPPORT / "kserve_calls.py", *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    outputs = []
    for question, line in zip(questions, ran.stdout.splitlines(), strict=True):
        rest, grpc = json.loads(line)
        outputs.append(rest["outputs"])
        health = {"live": True, "ready": True, "model": True, "unknown model": False}
        expected = {**health, "name": question.model, "outputs": outputs[-1]}
        assert [rest, grpc] == [expected, expected]
    return outputs


def test_its_clients_are_served_over_rest_and_grpc(
    kserve: Environment, http_server: RocserveProcess, tmp_path: Path
) -> None:
    np.save(tmp_path / "data.npy", np.array([[1, 2, 3, 4]], np.int32))
    question = Question(http_server.address, http_server.http_address, "add_sub", tmp_path / "data.npy")
    (outputs,) = answers(kserve, question)
    assert outputs["OUTPUT0"] == [2, 4, 6, 8]


def test_the_example_gets_numbers(kserve: Environment, serve: Callable[..., RocserveProcess], repository: Path) -> None:
    drop(repository, "m", add_constant(1.0))
    server = serve(repository)
    server.wait_until_ready()
    addresses = (f"--http-address={server.http_address}", f"--grpc-address={server.address}")
    command = [kserve.programs / "python", EXAMPLE, "m", "X", *addresses]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.stdout == "REST Y [[1.0, 2.0]]\ngRPC Y [[1.0, 2.0]]\n", ran.stderr


def test_the_objects_are_as_kserve_has_them(kserve: Environment) -> None:
    text = "---\n".join([rendered("kserve"), rendered("kserve/namespaced"), *map(Path.read_text, EXAMPLES)])
    ran = subprocess.run(
        [kserve.programs / "python", SUPPORT / "kserve_objects.py"],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.stdout, ran.returncode) == ("", 0), ran.stderr
    kinds = [(one["kind"], one["metadata"]["name"]) for one in objects(text)]
    assert kinds[:4] == [
        (kind, name) for kind in ("ClusterServingRuntime", "ServingRuntime") for name in ("rocserve", "rocserve-rocm")
    ]


def test_what_inference_services_name_is_served(kserve: Environment, tmp_path: Path) -> None:
    require_containers()
    with ExitStack() as running:
        pods = [running.enter_context(pod_of(read(example), tmp_path / example.stem)) for example in EXAMPLES]
        image = tmp_path / "image"
        wait_until(lambda: "waiting for '/mnt/models'" in (image / "log").read_text(), "a server that waits")
        (image / "shared" / "models").symlink_to("image/models")
        questions = []
        for example, pod in zip(EXAMPLES, pods, strict=True):
            pod.wait_until_ready()
            is_repository = example.stem == "ensemble"
            questions.append(
                Question(
                    f"127.0.0.1:{pod.ports['grpc']}",
                    f"127.0.0.1:{pod.ports['http']}",
                    "digits" if is_repository else read(example)["metadata"]["name"],
                    JPEG if is_repository else tmp_path / example.stem / "data.npy",
                )
            )
        outputs = dict(zip([example.stem for example in EXAMPLES], answers(kserve, *questions), strict=True))
        assert outputs["ensemble"]["LABEL"] == ["two"]
        assert outputs["model"] == outputs["gpu"] == outputs["image"]
        for pod in pods:
            pod.signal("TERM")
        for pod in pods:
            assert pod.wait(PATIENCE_SECONDS) == 0, pod.log


def runtime(name: str, service: str) -> dict[str, Any]:
    """The pod spec of a runtime, filled in for an InferenceService of this name as KServe does."""
    spec: dict[str, Any] = the("ClusterServingRuntime", rendered("kserve"), name)["spec"]
    return json.loads(json.dumps(spec).replace("{{.Name}}", service))  # type: ignore[no-any-return]


def pod_of(service: Mapping[str, Any], folder: Path) -> Pod:
    """The pod that KServe makes of an InferenceService and its runtime: names filled in, the service's arguments after
    the runtime's, and the model at the storage initializer's place; one in an image is not linked there yet."""
    wanted = service["spec"]["predictor"]["model"]
    spec = runtime(wanted["runtime"], service["metadata"]["name"])
    assert wanted["modelFormat"]["name"] in [entry["name"] for entry in spec["supportedModelFormats"]]
    assert wanted.get("protocolVersion", "v1") in spec["protocolVersions"]  # As KServe has it.
    # The container of an image links its files to a folder that it shares with the server's, after it has started.
    shared = folder / "shared"
    is_image = wanted["storageUri"].startswith("oci://")
    models = shared / "image" / "models" if is_image else folder / "models"
    if wanted["modelFormat"]["name"] == "triton":
        for model in SAMPLE.glob("digits*"):
            shutil.copytree(model, models / model.name)
    else:
        shutil.copytree(SAMPLE / "digits_classifier", models)
        np.save(folder / "data.npy", np.zeros((1, 1, 16, 16), np.float32))
    spec["containers"][0]["args"] += wanted.get("args", [])
    if is_image:
        spec["containers"][0]["env"].append({"name": "MODEL_INIT_MODE", "value": "async"})
        return Pod(spec, shared, "/mnt", folder)
    return Pod(spec, models, "/mnt/models", folder)
