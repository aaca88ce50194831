"""Attacks on explicit control and on files: names that lead outside, configurations that name code, endpoints for any
file. The server refuses each, and its answers contain nothing of the files outside."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import tritonclient.grpc as triton
from support.models import add_constant
from support.repository_index import index_of
from support.server import RocserveProcess
from support.waiting import PATIENCE_SECONDS, wait_until

from campaign import models
from campaign.action import Kind
from campaign.actions.fuzz_http import http_request
from campaign.requests import call, channel, exchange, infer_message
from campaign.stage import Stage
from rocserve.protocol import grpc_service_pb2 as messages

NOTICED_SECONDS = PATIENCE_SECONDS


def _outside_names(stage: Stage) -> list[str]:
    hidden = stage.canaries.model
    return [
        f"../outside/{hidden.name}",
        f"..\\outside\\{hidden.name}",
        f"{models.STEADY}/../../outside/{hidden.name}",
        str(hidden),
        f"//{hidden}",
        f"./../outside/{hidden.name}",
        f"../outside/{hidden.name}\x00",
        f"%2e%2e/outside/{hidden.name}",
        "..",
        ".",
        "/",
        "~",
        "../outside",
    ]


def outside_names(stage: Stage, random: random.Random) -> None:
    """Load models outside of the repository, and ask for their metadata, configuration, statistics and answers."""
    with channel(stage.explicit.address) as opened:
        for name in _outside_names(stage):
            _refused(stage, opened, "RepositoryModelLoad", messages.RepositoryModelLoadRequest(model_name=name))
            _refused(stage, opened, "ModelLoad", messages.ModelLoadRequest(name=name))
            for method, request in (
                ("ModelMetadata", messages.ModelMetadataRequest(name=name)),
                ("ModelConfig", messages.ModelConfigRequest(name=name)),
                ("ModelStatistics", messages.ModelStatisticsRequest(name=name)),
            ):
                _refused(stage, opened, method, request)
        for name in random.sample(_outside_names(stage), 4):
            request = infer_message(name)
            _, text, answer = call(opened, "ModelInfer", request.SerializeToString())
            stage.canaries.search("ModelInfer", answer + text.encode())


def _refused(stage: Stage, opened: Any, method: str, request: Any) -> None:
    status, text, answer = call(opened, method, request.SerializeToString())
    stage.tally.count(f"attack: {method}", status)
    stage.canaries.search(method, answer + text.encode())
    if status == "OK":
        stage.findings.add("attack accepted", f"{method} of {request}")
    if str(stage.canaries.folder) in text and stage.canaries.folder.name not in str(request):
        stage.findings.add("private path told", f"{method}: {text!r}")


def _hostile_configs(stage: Stage) -> Iterator[tuple[dict[str, Any], Mapping[str, bytes]]]:
    """Hostile configurations, and the files that come with them."""
    base = {"name": models.FUZZED, "backend": "onnxruntime", "max_batch_size": 8}
    program = str(stage.canaries.program)
    outside = f"../../outside/{stage.canaries.text.name}"
    content = add_constant(1.0)
    python = b"import pathlib\npathlib.Path('%s').touch()\nclass TritonPythonModel:\n    pass\n"
    planted = python % str(stage.canaries.ran).encode()
    yield {**base, "parameters": {"EXECUTION_ENV_PATH": {"string_value": program}}}, {}
    yield {**base, "backend": "python", "parameters": {"EXECUTION_ENV_PATH": {"string_value": program}}}, {}
    yield {**base, "backend": "python"}, {"1/model.py": planted}
    yield {**base, "backend": "python", "default_model_filename": "code.py"}, {"1/code.py": planted}
    yield {**base, "model_operations": {"op_library_filename": [program]}}, {}
    yield {**base, "model_operations": {"op_library_filename": ["x.so"]}}, {"x.so": b"\x7fELF", "1/model.onnx": content}
    yield {**base, "model_repository_agents": {"agents": [{"name": "checksum"}]}}, {}
    yield {**base, "default_model_filename": f"../{outside}"}, {}
    yield {**base, "default_model_filename": str(stage.canaries.model / "1" / "model.onnx")}, {}
    yield {**base, "runtime": program}, {}
    yield {**base, "backend": program}, {}
    yield {**base, "backend": "../../outside"}, {}
    yield base, {f"../../outside/{name}": content for name in ("planted",)}
    yield base, {"1/../../../outside/planted": content}
    yield base, {str(stage.canaries.folder / "planted"): content}
    output = {"name": "Y", "data_type": "TYPE_FP32", "dims": [2], "label_filename": outside}
    yield {**base, "output": [output]}, {}
    warm_up = {"name": "w", "batch_size": 1, "inputs": {"X": {"data_type": "TYPE_FP32", "dims": [2]}}}
    warm_up["inputs"]["X"]["input_data_file"] = f"../{outside}"  # type: ignore[index]
    yield {**base, "model_warmup": [warm_up]}, {}
    yield {**base, "instance_group": [{"count": 2_000_000_000, "kind": "KIND_CPU"}]}, {}


def hostile_configs(stage: Stage, random: random.Random) -> None:
    """Load six of the hostile configurations: the server refuses each, and goes on serving."""
    cases = list(_hostile_configs(stage))
    with stage.locks["explicit fuzzed"], channel(stage.explicit.address) as opened:
        for config, files in random.sample(cases, 6):
            request = messages.RepositoryModelLoadRequest(model_name=models.FUZZED)
            request.parameters["config"].string_param = json.dumps(config)
            for path, content in files.items():
                request.parameters[f"file:{path}"].bytes_param = content
            _refused(stage, opened, "RepositoryModelLoad", request)
        status, text, _ = call(opened, "ModelInfer", infer_message(models.FUZZED).SerializeToString())
        assert status == "OK", f"{models.FUZZED} after refused loads: {status} {text}"
        # With this load the repository's model is served, and the index no longer lists the refused models.
        plain = messages.RepositoryModelLoadRequest(model_name=models.FUZZED)
        status, text, _ = call(opened, "RepositoryModelLoad", plain.SerializeToString())
        assert status == "OK", f"a plain load of {models.FUZZED} after refused ones: {status} {text}"


def endpoints(stage: Stage, random: random.Random) -> None:
    """Call WorkerLoad for files outside and for a good file. Only the server under explicit control, which allows
    endpoints, may load the good file; then it unloads it."""
    hidden = stage.canaries.model / "1" / "model.onnx"
    with stage.locks["endpoints"], channel(stage.explicit.address) as opened:
        relative = f"../outside/{stage.canaries.model.name}/1/model.onnx"
        for file in (str(hidden), relative, ".", "..", "/", "/etc/passwd"):
            _refused(stage, opened, "WorkerLoad", _worker_load(file, 1))
        _, text, _ = call(opened, "WorkerLoad", _worker_load(f"{models.STEADY}/1/model.onnx", 2).SerializeToString())
        listed = _endpoints(opened)
        assert len(listed) <= 1, f"one good file was asked for: {listed}; {text}"
        for name in listed:
            call(opened, "WorkerUnload", messages.WorkerUnloadRequest(name=name).SerializeToString())
        assert not _endpoints(opened), f"endpoints after their unloads: {_endpoints(opened)}; {text}"
    with channel(stage.poll.address) as opened:
        for batch in range(1, 30):
            _refused(stage, opened, "WorkerLoad", _worker_load(f"{models.STEADY}/1/model.onnx", batch))


def _worker_load(file: str, batch: int) -> messages.WorkerLoadRequest:
    request = messages.WorkerLoadRequest(name="onnx")
    request.parameters["model"].string_param = file
    request.parameters["batch"].int64_param = batch
    return request


def _endpoints(opened: Any) -> list[str]:
    _, _, answer = call(opened, "ModelList", b"")
    return [name for name in messages.ModelListResponse.FromString(answer).models if name.startswith("onnx")]


def urls(stage: Stage, random: random.Random) -> None:
    """Ask for HTTP paths that lead out of the models' folders."""
    parts = ("..", "%2e%2e", "..%2f..", "%2e%2e%2f", "....//", "..;", "%252e%252e", "")
    for server in stage.servers.values():
        for _ in range(20):
            way = "/".join(random.choice(parts) for _ in range(random.randint(1, 5)))
            target = random.choice((f"outside/{stage.canaries.text.name}", "etc/passwd", "outside/hidden_model/config"))
            path = f"{random.choice(('/v2/models/', '/v2/repository/models/', '/'))}{way}/{target}"
            verb = random.choice(("GET", "POST"))
            answer = exchange(server.http_port, http_request(verb, path, b"", {"Connection": "close"}))
            stage.canaries.search(path, answer)
            stage.tally.count("attack: URLs", answer[9:12].decode(errors="replace") or "hung up")
            if b"root:" in answer:
                stage.findings.add("secret told", f"{path} answered with /etc/passwd")


def regions(stage: Stage, random: random.Random) -> None:
    """Register shared memory whose key names a file outside, or no file."""
    with channel(stage.poll.address) as opened:
        for key in (
            f"/../..{stage.canaries.text}",
            f"../..{stage.canaries.text}",
            str(stage.canaries.text),
            "/..",
            "/",
            "",
            "/.",
            "/../../etc/passwd",
        ):
            request = messages.SystemSharedMemoryRegisterRequest(name="attack", key=key, byte_size=8)
            _refused(stage, opened, "SystemSharedMemoryRegister", request)


def settings(stage: Stage, random: random.Random) -> None:
    """Send the log and traces into files outside."""
    target = str(stage.canaries.folder / "planted")
    with stage.poll.client() as client:
        for name, change in (
            ("log_file", lambda: client.update_log_settings({"log_file": target})),
            ("trace_file", lambda: client.update_trace_settings(settings={"trace_file": target})),
        ):
            try:
                change()
            except triton.InferenceServerException as error:
                stage.tally.count("attack: settings", str(error.status()))
            else:
                stage.findings.add("attack accepted", f"{name} is set to {target}")


def links(stage: Stage, random: random.Random) -> None:
    """Link a folder of the repository, or the file of a model, to the outside: the model is not served."""
    name = f"link_{random.getrandbits(32):x}"
    link = stage.copied / name
    if random.random() < 0.5:
        link.symlink_to(stage.canaries.model)
    else:
        models.drop_constant(stage.staging, name)
        (stage.staging / name / "1" / "model.onnx").unlink()
        (stage.staging / name / "1" / "model.onnx").symlink_to(stage.canaries.model / "1" / "model.onnx")
        (stage.staging / name).rename(link)
    wait_until(lambda: _is_refused(stage.poll, name), f"the refusal of {name}", seconds=NOTICED_SECONDS)
    if link.is_symlink():
        link.unlink()
    else:
        shutil.rmtree(link)


def _is_refused(server: RocserveProcess, name: str) -> bool:
    rows = index_of(server, name)
    assert all(state != "READY" for state, _ in rows.values()), f"{name}, a link out of the repository, is served"
    return any(reason for _, reason in rows.values())


KINDS = (
    Kind("attack.outside-names", outside_names, 3),
    Kind("attack.hostile-configs", hostile_configs),
    Kind("attack.endpoints", endpoints, 2),
    Kind("attack.urls", urls, 2),
    Kind("attack.regions", regions, 2),
    Kind("attack.settings", settings, 1),
    Kind("attack.links", links, 2),
)
