"""Calls that change the server: which client addresses may make them, over gRPC and HTTP, and with which secrets."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
import pytest
from support.certificates import make_authority
from support.models import add_constant, drop
from support.server import RocserveProcess, Start
from support.waiting import PATIENCE_SECONDS, wait_until

from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.services.access import ADMIN_METHODS


class Forwarder:
    """Forwards connections from a free port of the loopback; a context manager."""

    def __init__(self, port: int, source: str = "127.0.0.6") -> None:
        """`source`: the address from which the server sees the connections come."""
        self._target = ("127.0.0.1", port)
        self._source = (source, 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in (self._listener, *self._open):
            # Closing alone does not wake a thread that waits in it.
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target, source_address=self._source)
            self._open += [client, server]
            for ends in ((client, server), (server, client)):
                threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return


FOREIGN = "127.0.0.6"
"""Not loopback for the server: service meshes deliver other clients' calls from this address."""
SHARED = ("--model-control-mode=explicit", "--load-model=net", "--allow-client-shm=true")

Headers = tuple[tuple[str, str], ...]


def settings(kind: type, name: str) -> object:
    request = kind()
    if kind is pb.LogSettingsRequest:
        request.settings[name].bool_param = False
    else:
        request.settings[name].value.append("OFF")
    return request


CALLS = {
    "RepositoryModelLoad": pb.RepositoryModelLoadRequest(model_name="net"),
    "RepositoryModelUnload": pb.RepositoryModelUnloadRequest(model_name="absent"),
    "ModelLoad": pb.ModelLoadRequest(name="net"),
    "ModelUnload": pb.ModelUnloadRequest(name="absent"),
    "WorkerLoad": pb.WorkerLoadRequest(name="nothing"),
    "WorkerUnload": pb.WorkerUnloadRequest(name="absent"),
    "SystemSharedMemoryRegister": pb.SystemSharedMemoryRegisterRequest(name="r", key="/absent", byte_size=1),
    "SystemSharedMemoryUnregister": pb.SystemSharedMemoryUnregisterRequest(name="r"),
    "CudaSharedMemoryRegister": pb.CudaSharedMemoryRegisterRequest(name="r"),
    "CudaSharedMemoryUnregister": pb.CudaSharedMemoryUnregisterRequest(name="r"),
    "TraceSetting": settings(pb.TraceSettingRequest, "trace_level"),
    "LogSettings": settings(pb.LogSettingsRequest, "log_error"),
}
READS = {
    "RepositoryIndex": pb.RepositoryIndexRequest(),
    "ServerMetadata": pb.ServerMetadataRequest(),
    "ModelConfig": pb.ModelConfigRequest(name="net"),
    "ModelList": pb.ModelListRequest(),
    "HasHardware": pb.HasHardwareRequest(name="cpu", num=1),
    "TraceSetting": pb.TraceSettingRequest(),
    "LogSettings": pb.LogSettingsRequest(),
    "SystemSharedMemoryStatus": pb.SystemSharedMemoryStatusRequest(),
}
POSTS = {
    "/v2/repository/models/net/load": {},
    "/v2/repository/models/absent/unload": {},
    "/v2/repository/models/net/versions/1/load": {},
    "/v2/workers/nothing/load": {},
    "/v2/systemsharedmemory/region/r/register": {"key": "/absent", "byte_size": 1},
    "/v2/systemsharedmemory/unregister": {},
    "/v2/trace/setting": {"trace_level": ["OFF"]},
    "/v2/models/net/trace/setting": {"trace_level": ["OFF"]},
    "/v2/logging": {"log_error": False},
}
GETS = ("/v2", "/v2/models/net/config", "/v2/logging", "/v2/trace/setting", "/v2/models", "/v2/models/stats")


def call(port: int, method: str, request: object, headers: Headers = ()) -> tuple[str, str]:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        send = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
        try:
            send(request.SerializeToString(), timeout=PATIENCE_SECONDS, metadata=headers)
        except grpc.RpcError as error:
            return error.code().name, error.details()
    return "OK", ""


def ask(port: int, verb: str, path: str, body: object = None, headers: Headers = (), source: str = "") -> int:
    connection = http.client.HTTPConnection(
        "127.0.0.1", port, timeout=PATIENCE_SECONDS, source_address=(source, 0) if source else None
    )
    with closing(connection):
        connection.request(verb, path, None if body is None else json.dumps(body), dict(headers))
        return connection.getresponse().status


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("admin")
    drop(folder / "repository", "net", add_constant(1))
    return folder


@pytest.fixture(scope="module")
def server(start: Start, folder: Path) -> RocserveProcess:
    return start(folder / "repository", *SHARED, "--log-verbose=1")


def test_all_admin_calls_are_tried() -> None:
    assert set(CALLS) == ADMIN_METHODS


def test_clients_of_this_machine_only(server: RocserveProcess) -> None:
    with Forwarder(server.port, FOREIGN) as forwarder:
        for method, request in CALLS.items():
            assert call(forwarder.port, method, request) == (
                "PERMISSION_DENIED",
                f"{method} is an admin call, which this server takes from this machine, and this one comes from"
                f" {FOREIGN}; --admin-address sets the allowed sources",
            )
            assert call(server.port, method, request)[0] != "PERMISSION_DENIED", method
        for method, request in READS.items():
            assert call(forwarder.port, method, request) == ("OK", ""), method
    for path, body in POSTS.items():
        assert ask(server.http_port, "POST", path, body, source=FOREIGN) == 403, path
        assert ask(server.http_port, "POST", path, body) != 403, path
    for path in GETS:
        assert ask(server.http_port, "GET", path, source=FOREIGN) == 200, path
    assert ask(server.http_port, "POST", "/v2/repository/index", source=FOREIGN) == 200


@pytest.mark.parametrize("name", ["Forwarded", "X-Forwarded-For", "X-Real-IP", "Origin"])
def test_who_speaks_for_another_is_not_of_this_machine(server: RocserveProcess, name: str) -> None:
    header = ((name, "for=192.0.2.1"),)
    assert ask(server.http_port, "POST", "/v2/repository/models/net/load", {}, header) == 403
    status, text = call(server.port, "RepositoryModelLoad", CALLS["RepositoryModelLoad"], ((name.lower(), "x"),))
    assert status == "PERMISSION_DENIED"
    assert "comes from 127.0.0.1, which forwards it" in text


def test_the_log_says_who_may_call_what(server: RocserveProcess) -> None:
    expected = "admin calls: logging, model-repository, shared-memory, trace from this machine"
    for front_end in ("gRPC", "HTTP"):
        assert f"{front_end}: anybody may call health, inference, logging, metadata, model-config" in server.log_text
    assert server.log_text.count(expected) == 2


def test_where_admin_calls_may_come_from(folder: Path) -> None:
    flags = (*SHARED, "--admin-address=127.0.0.4/30")
    load = ("RepositoryModelLoad", CALLS["RepositoryModelLoad"])
    with RocserveProcess([folder / "repository"], *flags, log=folder / "list.log") as running:
        running.wait_until_ready()
        with Forwarder(running.port, FOREIGN) as forwarder:
            assert [call(port, *load)[0] == "OK" for port in (running.port, forwarder.port)] == [False, True]
        for source, expected in (("", False), (FOREIGN, True)):
            status = ask(running.http_port, "POST", "/v2/repository/models/net/load", {}, source=source)
            assert (status == 200) is expected


def test_protected_calls_come_from_anywhere_and_secrets_from_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = folder / "secret"
    secret.write_text("first\n")
    monkeypatch.setenv("CONTROL_TEST_KEY", "of the environment")
    flags = (
        *SHARED,
        "--log-verbose=1",
        f"--grpc-restricted-protocol=model-repository:key@file={secret}",
        "--http-restricted-api=model-repository:key@env=CONTROL_TEST_KEY",
    )
    load = ("RepositoryModelLoad", CALLS["RepositoryModelLoad"])
    key = "triton-grpc-protocol-key"
    with RocserveProcess([folder / "repository"], *flags, log=folder / "secret.log") as running:
        running.wait_until_ready()
        assert "first" not in " ".join(running.process.args)
        with Forwarder(running.port, FOREIGN) as forwarder:
            assert call(forwarder.port, *load, ((key, "first"),))[0] == "OK"
            assert call(forwarder.port, *load, ((key, f"@file={secret}"),))[0] == "UNAVAILABLE"
            assert call(running.port, *load)[0] == "UNAVAILABLE"
            # The other methods are not protected.
            assert (
                call(forwarder.port, "LogSettings", CALLS["LogSettings"], ((key, "first"),))[0] == "PERMISSION_DENIED"
            )
            assert ask(running.http_port, "POST", "/v2/logging", {"log_error": True}, source=FOREIGN) == 403
            header = (("key", "of the environment"),)
            url = "/v2/repository/models/net/load"
            assert ask(running.http_port, "POST", url, {}, header, source=FOREIGN) == 200
            assert ask(running.http_port, "POST", url, {}, source=FOREIGN) == 403

            # Replaced as certificates are renewed.
            new = folder / "secret.new"
            new.write_text("second")
            new.replace(secret)
            wait_until(lambda: call(forwarder.port, *load, ((key, "second"),))[0] == "OK")
            assert call(forwarder.port, *load, ((key, "first"),))[0] == "UNAVAILABLE"
            secret.unlink()
            wait_until(lambda: "stays unchanged" in _asked(running, forwarder.port, load, key))
            assert call(forwarder.port, *load, ((key, "second"),))[0] == "OK"
        assert "model-repository from anywhere" in running.log_text
        assert "with header 'triton-grpc-protocol-key' model-repository" in running.log_text


def _asked(server: RocserveProcess, port: int, load: tuple[str, object], key: str) -> str:
    call(port, *load, ((key, "second"),))
    return server.log_text


@pytest.mark.parametrize(("port", "other"), [("grpc", "http"), ("http", "grpc")])
def test_mutual_tls_protects(folder: Path, tmp_path: Path, port: str, other: str) -> None:
    certificates = make_authority(tmp_path / "certificates")
    flags = (
        *SHARED,
        "--log-verbose=1",
        f"--allow-{other}=false",
        f"--{port}-use-ssl-mutual=true",
        f"--grpc-server-cert={certificates.certificate}",
        f"--grpc-server-key={certificates.key}",
        f"--grpc-root-cert={certificates.root}",
    )
    with RocserveProcess([folder / "repository"], *flags, log=tmp_path / "tls.log") as running:
        expected = "admin calls: logging, model-repository, shared-memory, trace from"
        wait_until(lambda: f"{expected} anywhere" in running.log_text)
