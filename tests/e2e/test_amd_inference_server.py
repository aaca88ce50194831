"""AMD Inference Server's methods and requests, as its clients send them."""

from __future__ import annotations

import http.client
import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import pytest
from onnx import TensorProto, helper
from support.models import add_constant, drop, graph
from support.server import RocserveProcess
from support.waiting import PATIENCE_SECONDS, wait_until

from rocserve.protocol import grpc_service_pb2 as pb

SAMPLES = Path(__file__).parents[2] / "model_repository"
PICTURE = Path(__file__).parents[1] / "data" / "digits" / "1281_four.jpg"
AMD_CONFIG = """
name = "told"
platform = "onnx_onnxv1"

[[inputs]]
name = "X"
datatype = "FP32"
shape = [2]

[[outputs]]
name = "Y"
datatype = "FP32"
shape = [2]
"""

Value = bool | int | float | str


class AmdClient:
    """Makes calls and requests like that server's client library."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)

    def close(self) -> None:
        self._channel.close()

    def ask(self, method: str, request: object, answer: type) -> object:
        send = self._channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
        return answer.FromString(send(request.SerializeToString(), timeout=PATIENCE_SECONDS))

    def worker_load(self, worker: str, parameters: dict[str, Value]) -> str:
        request = pb.WorkerLoadRequest(name=worker)
        for name, value in parameters.items():
            field = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}[type(value)]
            setattr(request.parameters[name], field, value)
        return self.ask("WorkerLoad", request, pb.WorkerLoadResponse).endpoint

    def worker_unload(self, name: str) -> None:
        self.ask("WorkerUnload", pb.WorkerUnloadRequest(name=name), pb.WorkerUnloadResponse)

    def model_load(self, name: str, version: str = "") -> None:
        self.ask("ModelLoad", pb.ModelLoadRequest(name=name, version=version), pb.ModelLoadResponse)

    def model_unload(self, name: str, version: str = "") -> None:
        self.ask("ModelUnload", pb.ModelUnloadRequest(name=name, version=version), pb.ModelUnloadResponse)

    def model_list(self) -> list[str]:
        return list(self.ask("ModelList", pb.ModelListRequest(), pb.ModelListResponse).models)

    def model_ready(self, name: str, version: str = "") -> bool:
        return self.ask("ModelReady", pb.ModelReadyRequest(name=name, version=version), pb.ModelReadyResponse).ready

    def has_hardware(self, name: str, count: int) -> bool:
        return self.ask("HasHardware", pb.HasHardwareRequest(name=name, num=count), pb.HasHardwareResponse).found

    def infer(self, model: str, values: np.ndarray, name: str = "input0") -> pb.ModelInferResponse:
        """Send one item: without a batch dimension, with its values in the contents."""
        request = pb.ModelInferRequest(model_name=model)
        tensor = request.inputs.add(name=name, datatype="FP32", shape=values.shape)
        tensor.contents.fp32_contents.extend(values.ravel().tolist())
        return self.ask("ModelInfer", request, pb.ModelInferResponse)

    def load_ensemble(self, workers: list[str], parameters: list[dict[str, Value]]) -> list[str]:
        endpoints: list[str] = []
        following = ""
        for worker, given in reversed(list(zip(workers, parameters, strict=True))):
            following = self.worker_load(worker, {**given, "next": following} if following else given)
            assert self.model_ready(following)
            endpoints.insert(0, following)
        return endpoints


def values_of(response: pb.ModelInferResponse) -> list[float]:
    assert not response.raw_output_contents
    return list(response.outputs[0].contents.fp32_contents)


def double() -> bytes:
    """Z = 2 W, FP32 [batch, 2]: its input has another name than the previous stage's output."""
    spec = (TensorProto.FLOAT, ["batch", 2])
    return graph([helper.make_node("Add", ["W", "W"], ["Z"])], {"W": spec}, {"Z": spec})


ITEM = np.array([1, 2], np.float32)
PLAIN = "plain/1/model.onnx"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    fill(folder)
    return folder


def fill(repository: Path) -> None:
    drop(repository, "plain", add_constant(1))
    told = repository / "told"
    (told / "1").mkdir(parents=True)
    (told / "1" / "any name.onnx").write_bytes(add_constant(3))
    (told / "config.toml").write_text(AMD_CONFIG)


@dataclass(frozen=True, slots=True)
class Shared:
    """The server of the tests that load what they need; the next test finds nothing loaded."""

    server: RocserveProcess
    repository: Path
    outside: Path
    """A folder whose files --allow-worker-load lets clients load."""

    def path(self, name: str) -> str:
        return str(self.repository / name)


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    folder = tmp_path_factory.mktemp("amd")
    repository, outside = folder / "repository", folder / "outside"
    fill(repository)
    outside.mkdir()
    flags = ("--model-control-mode=explicit", f"--allow-worker-load={outside}")
    with RocserveProcess([repository, SAMPLES], *flags, log=folder / "server.log") as server:
        yield Shared(server, repository, outside)


@pytest.fixture
def shared(shared_server: Shared) -> Iterator[Shared]:
    yield shared_server
    with closing(AmdClient(shared_server.server.address)) as client:
        # Each load needs an unload. A chain is behind its parts; without one it is not listed, and stays.
        while names := client.model_list():
            client.model_unload(names[-1])


@pytest.fixture
def connect() -> Iterator[Callable[[RocserveProcess], AmdClient]]:
    clients = []

    def open_client(server: RocserveProcess) -> AmdClient:
        clients.append(AmdClient(server.address))
        return clients[-1]

    yield open_client
    for client in clients:
        client.close()


def refusal(call: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as raised:
        call()
    return raised.value.code().name, raised.value.details()


def test_workers(shared: Shared, connect) -> None:
    outside = shared.outside
    (outside / "model.onnx").write_bytes(add_constant(10))
    (outside / "double.onnx").write_bytes(double())
    client = connect(shared.server)
    assert client.model_list() == []
    plain = {"model": shared.path(PLAIN), "batch": 64}

    # The same worker with the same parameters is one endpoint; other parameters make another.
    assert client.worker_load("migraphx", plain) == "migraphx"
    assert client.worker_load("MIGraphX", plain) == "migraphx"
    other = {"model": str(outside / "model.mxr"), "batch": 4, "max_buffer_num": 100}
    assert client.worker_load("migraphx", other) == "migraphx-0"
    assert client.worker_load("migraphx", {**other, "share": False}) == "migraphx-0"
    assert client.model_list() == ["migraphx", "migraphx-0"]
    response = client.infer("migraphx", ITEM)
    assert (response.model_name, list(response.outputs[0].shape)) == ("migraphx", [2])
    assert values_of(response) == [2, 3]
    assert values_of(client.infer("migraphx-0", ITEM)) == [11, 12]

    # Each load needs an unload; a further unload succeeds all the same.
    client.worker_unload("migraphx")
    client.worker_unload("migraphx")
    client.model_unload("migraphx-0")
    assert client.model_list() == ["migraphx-0"]
    assert values_of(client.infer("migraphx-0", ITEM)) == [11, 12]
    client.model_unload("migraphx-0")
    assert client.model_list() == []
    assert not client.model_ready("migraphx-0")
    assert client.worker_load("migraphx", other) == "migraphx"

    # A chain, whose stages are joined by the order of their tensors.
    chain = client.load_ensemble(
        ["onnx", "migraphx"], [{"model": plain["model"]}, {"model": str(outside / "double.onnx"), "batch": 8}]
    )
    assert chain == ["onnx", "migraphx-0"]
    response = client.infer("onnx", ITEM)
    assert (values_of(response), list(response.outputs[0].shape)) == ([4, 6], [2])
    assert client.model_list() == ["migraphx", "migraphx-0", "onnx"]
    for endpoint in chain:
        client.model_unload(endpoint)
    assert client.model_list() == ["migraphx"]


def test_a_pipeline_before_a_network(shared: Shared, connect) -> None:
    """Its JSON gives neither layout nor datatype: the pipeline uses those of the next stage."""
    client = connect(shared.server)
    pipeline = {"model": "digits_preprocess/1/pipeline.json", "batch": 4, "color_format": "U8"}
    network = {"model": "digits_classifier/1/model.onnx", "batch": 4}
    endpoint, _ = client.load_ensemble(["rocal", "migraphx"], [pipeline, network])
    picture = PICTURE.read_bytes()
    for datatype in ("BYTES", "UINT8"):
        request = pb.ModelInferRequest(model_name=endpoint)
        tensor = request.inputs.add(name="input0", datatype=datatype, shape=[len(picture)])
        if datatype == "BYTES":
            tensor.contents.bytes_contents.append(picture)
        else:
            tensor.contents.uint_contents.extend(picture)
        outputs = {output.name: output for output in client.ask("ModelInfer", request, pb.ModelInferResponse).outputs}
        assert list(outputs["PROBABILITIES"].shape) == [10]
        assert list(outputs["LABEL"].contents.bytes_contents) == [b"four"]


def test_clients_that_ask_at_once_share_an_endpoint(shared: Shared, connect) -> None:
    client = connect(shared.server)
    plain = {"model": PLAIN, "batch": 8}
    with ThreadPoolExecutor(8) as threads:
        same = list(threads.map(lambda _: client.worker_load("onnx", plain), range(8)))
        different = list(threads.map(lambda batch: client.worker_load("onnx", {**plain, "batch": batch}), range(1, 5)))
        missing = [threads.submit(client.worker_load, "onnx", {"model": "none.onnx"}) for _ in range(4)]
    assert set(same) == {"onnx"}
    assert sorted(different) == ["onnx-0", "onnx-1", "onnx-2", "onnx-3"]
    assert all(isinstance(one.exception(), grpc.RpcError) for one in missing)
    assert client.model_list() == ["onnx", *sorted(different)]
    for endpoint in ["onnx", *different]:
        client.worker_unload(endpoint)
    assert client.model_list() == []


def test_an_endpoint_whose_file_has_gone_is_unloaded(shared: Shared, connect) -> None:
    client = connect(shared.server)
    file = shared.repository / "gone.onnx"
    file.write_bytes(add_constant(1))
    given = {"model": str(file), "share": False}
    assert [client.worker_load("onnx", given) for _ in range(2)] == ["onnx", "onnx"]
    file.unlink()
    client.worker_unload("onnx")
    assert client.model_list() == ["onnx"]
    wait_until(lambda: "endpoint 'onnx' keeps its instances: model file " in shared.server.log_text)
    client.worker_unload("onnx")
    assert client.model_list() == []


def test_a_further_instance_of_a_chain(shared: Shared, connect) -> None:
    client, other = connect(shared.server), connect(shared.server)
    file = shared.repository / "first.onnx"
    file.write_bytes(add_constant(1))
    last = client.worker_load("onnx", {"model": shared.path(PLAIN)})
    given = {"model": str(file), "next": last, "share": False}
    chain = client.worker_load("onnx", given)
    (expected,) = {tuple(values_of(client.infer(chain, ITEM)))}
    begun, ends = threading.Event(), threading.Event()

    def ask_on() -> None:
        while not ends.is_set():
            assert tuple(values_of(other.infer(chain, ITEM))) == expected
            begun.set()

    with ThreadPoolExecutor() as pool:
        asked = pool.submit(ask_on)
        try:
            assert begun.wait(PATIENCE_SECONDS)
            assert client.worker_load("onnx", given) == chain
            # A failed load changes nothing, and is not retried.
            file.write_bytes(b"no model")
            code, text = refusal(lambda: client.worker_load("onnx", given))
            assert (code, "cannot load first.onnx" in text) == ("INVALID_ARGUMENT", True)
        finally:
            ends.set()
        asked.result()
    index = json.loads(asked_over_http(shared.server, "POST", "/v2/repository/index", {})[1])
    # The endpoints of other tests stay in the index, unloaded.
    served = client.model_list()
    states = {(entry["state"], entry.get("reason", "")) for entry in index if entry["name"] in served}
    assert states == {("READY", "")}
    client.worker_unload(chain)
    assert tuple(values_of(client.infer(chain, ITEM))) == expected
    client.worker_unload(chain)
    assert client.model_list() == [last]


def test_a_chain_goes_with_its_part(shared: Shared, connect) -> None:
    client = connect(shared.server)
    file = {"model": shared.path(PLAIN)}
    last = client.worker_load("onnx", file)
    chain = client.worker_load("onnx", {**file, "next": last})
    expected = values_of(client.infer(chain, ITEM))
    client.ask(
        "RepositoryModelUnload",
        pb.RepositoryModelUnloadRequest(model_name=f"{chain}_stage"),
        pb.RepositoryModelUnloadResponse,
    )
    assert client.model_list() == [last]
    assert client.worker_load("onnx", {**file, "next": last}) == chain
    assert values_of(client.infer(chain, ITEM)) == expected


def test_workers_that_cannot_be_had(shared: Shared, connect, tmp_path: Path) -> None:
    repository = shared.repository
    secret = tmp_path / "secret.onnx"
    secret.write_bytes(add_constant(1))
    (repository / "way out").symlink_to(tmp_path)
    (repository.parent / "secret.onnx").write_bytes(secret.read_bytes())
    client = connect(shared.server)
    for path in (secret, repository / ".." / "secret.onnx", repository / "way out" / "secret.onnx", tmp_path / "none"):
        code, text = refusal(lambda path=path: client.worker_load("migraphx", {"model": str(path)}))
        assert code == "PERMISSION_DENIED", text
        assert "' is not in a model repository; put it there, or start the server with" in text
        assert str(tmp_path) not in text and str(repository.parent) not in text
    missing = repository / "plain" / "none.onnx"
    code, text = refusal(lambda: client.worker_load("onnx", {"model": str(missing)}))
    assert (code, text) == (
        "NOT_FOUND",
        "model file plain/none.onnx not found or can't be opened; looked for plain/none.onnx",
    )
    (repository / "broken.onnx").write_bytes(b"this is no model")
    code, text = refusal(lambda: client.worker_load("migraphx", {"model": "broken.onnx"}))
    assert code == "INVALID_ARGUMENT"
    assert text.startswith("load failed for model 'migraphx': version 1 is at UNAVAILABLE state: ")
    for worker, code, text in (
        ("nothing", "NOT_FOUND", "there is no worker 'nothing'; expected one of migraphx, onnx, "),
        ("ptzendnn", "UNIMPLEMENTED", "the worker 'ptzendnn' cannot be loaded: export the model to ONNX and load it"),
        ("migraphx", "INVALID_ARGUMENT", "the worker 'migraphx' needs the parameter 'model', the path of the model's"),
    ):
        refused = refusal(lambda worker=worker: client.worker_load(worker, {}))
        assert (refused[0], refused[1][: len(text)]) == (code, text)
    model = shared.path(PLAIN)
    for more, code, text in (
        ({"batch": 0}, "INVALID_ARGUMENT", "parameter 'batch' must be a positive integer, got 0"),
        ({"next": "none"}, "NOT_FOUND", "No next endpoint found at: none"),
    ):
        assert refusal(lambda more=more: client.worker_load("migraphx", {"model": model, **more})) == (code, text)
    # The failed load left nothing behind.
    assert client.model_list() == []
    assert client.worker_load("migraphx", {"model": model}) == "migraphx"


def test_models_of_the_repository(shared: Shared, connect) -> None:
    client = connect(shared.server)
    client.model_load("TOLD")
    client.model_load("told", "1")
    assert client.model_ready("told", "1")
    response = client.infer("told", ITEM)
    assert (values_of(response), list(response.outputs[0].shape)) == ([4, 5], [2])
    batch = client.infer("told", np.stack([ITEM, ITEM]), "X")
    assert (values_of(batch), list(batch.outputs[0].shape)) == ([4, 5, 4, 5], [2, 2])
    assert refusal(lambda: client.model_load("told", "2"))[0] == "NOT_FOUND"
    assert refusal(lambda: client.model_load("none")) == (
        "INTERNAL",
        "failed to load 'none', failed to poll from model repository",
    )
    client.model_unload("none")
    client.model_unload("told", "1")
    wait_until(lambda: not client.model_ready("told"))


def test_models_that_the_server_itself_follows(serve, connect, repository: Path) -> None:
    server = serve(repository, flags=("--allow-amd-endpoints=true",))
    server.wait_until_ready()
    client = connect(server)
    assert client.model_list() == ["plain", "told"]
    client.model_load("told")
    assert refusal(lambda: client.model_unload("told")) == (
        "UNAVAILABLE",
        "explicit model load / unload is not allowed if polling is enabled",
    )
    # An endpoint cannot take the name of a model in the repository.
    drop(repository, "onnx", add_constant(5))
    wait_until(lambda: client.model_ready("onnx"))
    model = str(repository / PLAIN)
    assert client.worker_load("onnx", {"model": model}) == "onnx-0"
    assert values_of(client.infer("onnx-0", ITEM)) == [2, 3]
    client.model_unload("onnx-0")
    assert client.model_list() == ["onnx", "plain", "told"]


def test_hardware(shared: Shared, connect) -> None:
    client = connect(shared.server)
    assert client.has_hardware("CPU", 1)
    assert client.has_hardware("cpu", len(os.sched_getaffinity(0)))
    assert not client.has_hardware("cpu", 100_000)
    assert not client.has_hardware("DPUCADF8H", 0)


def asked_over_http(server: RocserveProcess, verb: str, path: str, body: object = None) -> tuple[int, str]:
    with closing(http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=PATIENCE_SECONDS)) as connection:
        connection.request(verb, path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        return response.status, response.read().decode()


def test_the_same_over_http(shared: Shared) -> None:
    ask = partial(asked_over_http, shared.server)

    assert json.loads(ask("GET", "/v2")[1])["extensions"][-2:] == ["migraphx", "rocal"]
    assert ask("POST", "/v2/hardware", {"name": "cpu", "num": 1})[0] == 200
    assert ask("POST", "/v2/hardware", {"name": "DPUCADF8H", "num": 1})[0] == 404
    model = {"model": shared.path(PLAIN), "batch": 4, "share": True, "pad_batch": False, "batchers": 2}
    assert ask("POST", "/v2/workers/MIGraphX/load", model) == (200, "migraphx")
    given = json.loads(ask("GET", "/v2/models/migraphx/config")[1])["parameters"]
    assert {name: value["string_value"] for name, value in given.items()} == {"batch": "4", "pad_batch": "false"}
    assert ask("POST", "/v2/workers/migraphx/load", {"model": ["a"]})[0] == 400
    assert ask("POST", "/v2/workers/nothing/load", {})[0] == 404
    assert ask("POST", "/v2/repository/models/told/versions/1/load", {}) == (200, "")
    assert json.loads(ask("GET", "/v2/models")[1]) == {"models": ["migraphx", "told"]}
    item = {"name": "input0", "datatype": "FP32", "shape": [2], "data": [1.0, 2.0]}
    for name, expected in (("migraphx", [2.0, 3.0]), ("told", [4.0, 5.0])):
        status, text = ask("POST", f"/v2/models/{name}/infer", {"inputs": [item]})
        assert status == 200, text
        answer = json.loads(text)["outputs"][0]
        assert (answer["shape"], answer["data"]) == ([2], expected)
    assert ask("POST", "/v2/workers/migraphx/unload") == (200, "")
    assert ask("POST", "/v2/repository/models/told/versions/1/unload") == (200, "")
    wait_until(lambda: json.loads(ask("GET", "/v2/models")[1]) == {"models": []})
