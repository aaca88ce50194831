"""What models' processes may do: their user, what they see of the server, and what they are denied."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from support.infer_inputs import infer_input
from support.models import add_constant, drop
from support.processes import wait_until_ended
from support.repository_index import reason_of
from support.server import RocserveProcess
from support.waiting import PATIENCE_SECONDS, wait_until
from tritonclient.utils import InferenceServerException

import rocserve

CONFIG = """
backend: "python"
input { name: "CODE" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "VALUE" data_type: TYPE_STRING dims: [ 1 ] }
"""

# Returns the value of a Python expression, or the error that it raises.
TELLS = """
import ctypes
import os
import pathlib
import resource
import socket

import numpy as np
import triton_python_backend_utils as pb_utils

libc = ctypes.CDLL(None, use_errno=True)


def status():
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return dict(line.split(":\\t", 1) for line in lines if ":\\t" in line)


def read(path):
    return pathlib.Path(path).read_bytes()


def attach(pid):
    # PTRACE_ATTACH, and if that were allowed, PTRACE_DETACH.
    if libc.ptrace(16, pid, 0, 0) == 0:
        os.waitpid(pid, 0)
        libc.ptrace(17, pid, 0, 0)
        return "attached"
    return os.strerror(ctypes.get_errno())


class TritonPythonModel:
    def execute(self, requests):
        (code,) = pb_utils.get_input_tensor_by_name(requests[0], "CODE").as_numpy().tolist()
        try:
            value = repr(eval(code.decode(), globals()))
        except OSError as error:
            value = repr(error.strerror)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("VALUE", np.array([value.encode()], np.object_))])]
"""

DENIED = "Permission denied"
REFUSED = "Operation not permitted"
SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "s3cr3t",
    "HF_TOKEN": "t0ken",
    "FOR_ONE": "1",
    "FOR_ALL": "2",
    "OMP_WAIT_POLICY": "PASSIVE",
}
NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes as another user")


class Asked:
    """A served model that reports what its process may do."""

    def __init__(self, server: RocserveProcess) -> None:
        self._client = server.client()

    def __call__(self, code: str, model: str = "tells") -> Any:
        entry = infer_input("CODE", np.array([code.encode()], np.object_))
        (value,) = self._client.infer(model, [entry]).as_numpy("VALUE").tolist()
        return ast.literal_eval(value.decode())


@pytest.fixture(scope="module")
def public_python() -> tuple[str, Mapping[str, str]]:
    """A Python that user nobody may run, with all that the server needs, and the environment variables that it
    takes."""
    packages = [Path(rocserve.__file__).parents[1], Path(triton.__file__).parents[2], Path(np.__file__).parents[1]]
    variables = {"PYTHONPATH": ":".join(map(str, packages))}
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for python in (sys.executable, f"/usr/local/bin/{name}", f"/usr/bin/{name}"):
        command = ["/usr/bin/env", *(f"{key}={value}" for key, value in variables.items()), python, "-c"]
        code = "import ctypes, asyncio, numpy, rocserve.workers.main"
        if Path(python).exists() and not subprocess.run([*command, code], user=NOBODY, cwd="/", check=False).returncode:
            return python, variables
    pytest.skip("there is no Python here that user nobody may run with the server's packages")


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder that all users may read; pytest's own folders are for root only."""
    folder = Path(tempfile.mkdtemp(prefix="rocserve-isolation-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def server(place: Path, public_python: tuple[str, Mapping[str, str]]) -> Iterator[RocserveProcess]:
    """A server with two models, which runs them as user nobody without a flag."""
    python, variables = public_python
    for name in ("tells", "other"):
        drop(place / "models", name, TELLS, CONFIG)
    secret = place / "secret"
    secret.write_text("of root")
    secret.chmod(0o600)
    flags = (
        "--worker-environment=FOR_ALL",
        "--worker-environment=tells:FOR_ONE,NOT_THERE",
        "--worker-file-bytes=4000000",
    )
    with RocserveProcess(
        [place / "models"], *flags, log=place / "server.log", environment={**SECRETS, **variables}, python=python
    ) as server:
        server.wait_until_ready()
        yield server


@needs_root
def test_a_model_runs_as_nobody_without_rights(server: RocserveProcess):
    ask = Asked(server)
    assert ask("os.getresuid(), os.getresgid()") == ((NOBODY,) * 3, (NOBODY,) * 3)
    assert 0 not in ask("os.getgroups()")
    status = ask("status()")
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(status[name], 16) == 0, name
    assert status["NoNewPrivs"] == "1"
    assert status["Name"] == "rocserve:tells"
    assert ask("read('/proc/self/oom_score_adj')") == b"300\n"
    assert ask("resource.getrlimit(resource.RLIMIT_CORE)") == (0, 0)
    assert ask("resource.getrlimit(resource.RLIMIT_FSIZE)") == (4_000_000, 4_000_000)
    assert ask("resource.getrlimit(resource.RLIMIT_NOFILE)[1]") <= 65_536
    assert "run as root" not in server.log_text


@needs_root
def test_a_model_reaches_neither_files_of_root_nor_the_server_nor_other_models(server: RocserveProcess, place: Path):
    ask = Asked(server)
    pid = server.server_process().pid
    assert ask(f"read('{place}/secret')") == DENIED
    assert ask(f"open('{place}/models/tells/1/model.py', 'a')") == DENIED
    assert ask("os.setuid(0)") == REFUSED
    assert ask(f"os.kill({pid}, 9)") == REFUSED
    other = ask("os.getpid()", "other")
    for victim in (pid, other):
        assert ask(f"attach({victim})") == REFUSED
        for file in ("environ", "mem", "maps"):
            assert ask(f"read('/proc/{victim}/{file}')") == DENIED, file
    # What all processes of one user may do to each other (docs/reference/security.md).
    assert ask(f"os.kill({other}, 0)") is None


@needs_root
def test_a_model_sees_of_the_servers_environment_what_it_needs(server: RocserveProcess):
    ask = Asked(server)
    for model, named in (("tells", {"FOR_ONE": "1", "FOR_ALL": "2"}), ("other", {"FOR_ALL": "2"})):
        environment = ask("dict(os.environ)", model)
        assert {name: environment[name] for name in SECRETS if name in environment} == {
            **named,
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        assert environment["USER"] == "nobody"
    for worker in server.workers():
        (zygote,) = worker.parents()[:1]
        for process in (worker, zygote):
            seen = Path(f"/proc/{process.pid}/environ").read_text()
            assert "s3cr3t" not in seen and "t0ken" not in seen


@needs_root
def test_a_model_may_open_its_output_again(server: RocserveProcess):
    assert Asked(server)("os.system('echo told by a child > /dev/stderr')") == 0
    wait_until(lambda: "told by a child" in server.log_text, "the line in the log")


@needs_root
def test_a_worker_of_another_user_is_ended_and_restarted(server: RocserveProcess):
    ask = Asked(server)
    (worker,) = server.workers("other")
    worker.kill()
    wait_until_ended([worker])
    assert ask("os.getuid()", "other") == NOBODY


@needs_root
def test_a_file_beyond_the_bound_ends_the_model_alone(server: RocserveProcess):
    ask = Asked(server)
    file = tempfile.mktemp()
    assert ask(f"open('{file}', 'wb').write(bytes(3_000_000))") == 3_000_000
    # Python ignores the signal, and the write fails.
    assert ask(f"open('{file}', 'wb').write(bytes(5_000_000))") == "File too large"
    assert ask("os.getuid()", "other") == NOBODY
    Path(file).unlink()


@needs_root
def test_what_a_request_brings_runs_as_nobody(
    place: Path, public_python: tuple[str, Mapping[str, str]], tmp_path: Path
):
    python, variables = public_python
    (place / "empty").mkdir()
    flags = (
        "--model-control-mode=explicit",
        "--allow-remote-files=true",
        "--allow-remote-models=true",
        f"--allow-worker-load={place}",
    )
    (place / "given.onnx").write_bytes(add_constant(2.0))
    with RocserveProcess(
        [place / "empty"], *flags, log=tmp_path / "server.log", environment=variables, python=python
    ) as server:
        config = '{"backend": "onnxruntime"}'
        server.client().load_model("brought", config=config, files={"file:1/model.onnx": add_constant(1.0)})
        endpoint = f"http://127.0.0.1:{server.http_port}/v2/workers/onnx/load"
        body = json.dumps({"model": str(place / "given.onnx")}).encode()
        urllib.request.urlopen(urllib.request.Request(endpoint, body)).close()
        users = {worker.name(): worker.uids().real for worker in server.workers()}
        assert users == {"rocserve:brought"[:15]: NOBODY, "rocserve:onnx": NOBODY}, server.log_text


def served_by_root(tmp_path: Path, *flags: str) -> RocserveProcess:
    return RocserveProcess([tmp_path / "models"], *flags, log=tmp_path / "server.log", environment=SECRETS)


@needs_root
def test_models_that_only_root_may_read_run_as_root_with_a_warning(tmp_path: Path):
    for name in ("tells", "other"):
        drop(tmp_path / "models", name, TELLS, CONFIG)
    (tmp_path / "models" / "tells" / "1" / "model.py").chmod(0o600)
    (tmp_path / "models" / "other" / "1" / "model.py").chmod(0o600)
    with served_by_root(tmp_path) as server:
        server.wait_until_ready()
        ask = Asked(server)
        assert ask("os.getuid()") == 0
        status = ask("status()")
        assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
        assert status["NoNewPrivs"] == "1"
        assert "AWS_SECRET_ACCESS_KEY" not in ask("dict(os.environ)")
        pid = server.server_process().pid
        assert ask(f"read('/proc/{pid}/environ')") == DENIED
        assert ask(f"attach({pid})") == REFUSED
        assert server.log_text.count("Let that user read it (chmod)") == 1
        assert server.log_text.count("run as root: user 'nobody' cannot read") == 1, server.log_text


@needs_root
def test_root_is_kept_where_that_is_asked_for(tmp_path: Path):
    drop(tmp_path / "models", "tells", TELLS, CONFIG)
    theirs = tmp_path / "theirs"
    theirs.write_text("x")
    theirs.chmod(0o600)
    os.chown(theirs, NOBODY, NOBODY)
    with served_by_root(tmp_path, "--worker-user=root") as server:
        server.wait_until_ready()
        ask = Asked(server)
        assert ask("os.getuid()") == 0
        # Like any user without capabilities.
        assert ask(f"read('{theirs}')") == DENIED
        assert "run as root" not in server.log_text


@needs_root
def test_a_user_that_is_named_has_to_be_able_to_read_the_model(tmp_path: Path):
    drop(tmp_path / "models", "tells", TELLS, CONFIG)
    with served_by_root(tmp_path, "--worker-user=daemon") as server:
        wait_until(lambda: "user 'daemon' cannot read" in reason_of(server, "tells"), "the reason")
        with pytest.raises(InferenceServerException):
            Asked(server)("1")


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("--worker-user=nobody-at-all", "there is no user 'nobody-at-all'"),
        ("--worker-user=nobody:no-such-group", "there is no group 'no-such-group'"),
        ("--worker-environment=", "expected [MODEL:]NAME[,NAME...]"),
    ],
)
def test_flags_that_cannot_be_served(tmp_path: Path, flag: str, text: str):
    command = [sys.executable, "-m", "rocserve.cli", "serve", f"--model-repository={tmp_path}", "--grpc-port=0", flag]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert done.returncode == 2
    assert text in done.stderr
