"""TLS on all three ports with one set of certificates: accepted and refused clients, renewal, and no unprotected
port."""

from __future__ import annotations

import http.client
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from support.certificates import Authority, make_authority
from support.http_requests import add_sub_inputs
from support.metrics import FLAGS as METRICS
from support.metrics import port_of
from support.parity.models import parity_models, write_model
from support.server import RocserveProcess
from support.tools import Command
from support.waiting import PATIENCE_SECONDS, wait_until

ALL_PORTS = ("--grpc-use-ssl", "--http-use-ssl", "--metrics-use-ssl", "--front-ends=0", *METRICS)
ALL_MUTUAL = ("--grpc-use-ssl-mutual", "--http-use-ssl-mutual", "--metrics-use-ssl-mutual", "--front-ends=2", *METRICS)
CONNECTIONS = 16
"""So many that each front end has a connection, except once in 30,000 times."""

LIVE = "/inference.GRPCInferenceService/ServerLive"


@dataclass(frozen=True)
class Served:
    server: RocserveProcess
    files: Authority
    """The files that the server uses; a test may replace them."""


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path / "cache", capsys)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command is missing")
    return make_authority(tmp_path_factory.mktemp("certificates") / "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("certificates") / "theirs")


@pytest.fixture(scope="module", params=["TLS", "mutual TLS, by separate processes"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, ours: Authority
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("tls")
    repository = folder / "repository"
    repository.mkdir()
    write_model(repository, next(model for model in parity_models() if model.name == "add_sub"))
    files = Authority(folder / "root.pem", folder / "cert.pem", folder / "cert.key")
    put(ours, files)
    flags = (
        *(ALL_PORTS if request.param == "TLS" else ALL_MUTUAL),
        f"--grpc-server-cert={files.certificate}",
        f"--grpc-server-key={files.key}",
        f"--grpc-root-cert={files.root}",
    )
    with RocserveProcess([repository], *flags, log=folder / "log") as server:
        wait_until(lambda: "1 model served" in server.log_text, "the model")
        yield Served(server, files)


def put(source: Authority, target: Authority) -> None:
    """Replace each file atomically, as a renewal does."""
    for name in ("root", "certificate", "key"):
        new = getattr(target, name).with_suffix(".new")
        shutil.copy(getattr(source, name), new)
        new.replace(getattr(target, name))


def trusting(trusted: Authority, shown: Authority | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(trusted.root))
    if shown is not None:
        context.load_cert_chain(shown.certificate, shown.key)
    return context


def get(port: int, path: str, trusted: Authority, shown: Authority | None) -> int:
    connection = http.client.HTTPSConnection(
        "localhost", port, timeout=PATIENCE_SECONDS, context=trusting(trusted, shown)
    )
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


def grpc_is_served(served: Served, trusted: Authority, shown: Authority | None) -> bool:
    pair = () if shown is None else (shown.key.read_bytes(), shown.certificate.read_bytes())
    credentials = grpc.ssl_channel_credentials(trusted.root.read_bytes(), *pair)
    options = (("grpc.use_local_subchannel_pool", 1),)
    with grpc.secure_channel(f"localhost:{served.server.port}", credentials, options) as channel:
        try:
            return bool(channel.unary_unary(LIVE)(b"", timeout=PATIENCE_SECONDS))
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            return False


def is_mutual(served: Served) -> bool:
    return "--http-use-ssl-mutual" in served.server._command


def ports(served: Served) -> list[tuple[int, str]]:
    return [(served.server.http_port, "/v2/health/live"), (port_of(served.server), "/metrics")]


def test_who_trusts_the_certificate_is_served(served: Served, ours: Authority, theirs: Authority) -> None:
    for port, path in ports(served):
        assert {get(port, path, ours, ours) for _ in range(CONNECTIONS)} == {200}
        with pytest.raises(ssl.SSLCertVerificationError):
            get(port, path, theirs, ours)
    assert all(grpc_is_served(served, ours, ours) for _ in range(CONNECTIONS))
    assert not grpc_is_served(served, theirs, ours)


def test_clients_without_or_with_a_foreign_certificate(served: Served, ours: Authority, theirs: Authority) -> None:
    for port, path in ports(served):
        for shown in (None, theirs):
            if is_mutual(served):
                # The refusal may come when the first bytes are read, or as a closed connection.
                with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
                    get(port, path, ours, shown)
            else:
                assert get(port, path, ours, shown) == 200
    assert [grpc_is_served(served, ours, shown) for shown in (None, theirs)] == [not is_mutual(served)] * 2


def test_nothing_is_answered_without_tls(served: Served, command: Command) -> None:
    for port, path in ports(served):
        connection = http.client.HTTPConnection("localhost", port, timeout=PATIENCE_SECONDS)
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            connection.request("GET", path)
            connection.getresponse()
        connection.close()
    status = command("status", "--once", f"--url=localhost:{served.server.port}")
    assert status.status == 1
    assert "does it need TLS?" in status.err


def test_triton_s_client_over_https(served: Served, ours: Authority) -> None:
    options = {"ca_certs": str(ours.root), "keyfile": str(ours.key), "certfile": str(ours.certificate)}
    address = f"localhost:{served.server.http_port}"
    with http_client.InferenceServerClient(address, ssl=True, ssl_options=options) as client:
        assert client.is_server_ready()
        assert client.infer("add_sub", add_sub_inputs()).as_numpy("OUTPUT0").tolist() == [[6, 7, 8, 9]]


def test_triton_s_client_over_grpc(served: Served, ours: Authority) -> None:
    with grpc_client.InferenceServerClient(
        f"localhost:{served.server.port}",
        ssl=True,
        root_certificates=str(ours.root),
        private_key=str(ours.key),
        certificate_chain=str(ours.certificate),
    ) as client:
        assert client.is_model_ready("add_sub")


def test_curl_and_the_status_verb(served: Served, ours: Authority, command: Command) -> None:
    shown = ["--cert", str(ours.certificate), "--key", str(ours.key), "--cacert", str(ours.root)]
    if shutil.which("curl"):
        for port, path in ports(served):
            told = subprocess.run(
                ["curl", "-sSf", "--max-time", str(PATIENCE_SECONDS), *shown, f"https://localhost:{port}{path}"],
                check=False,
                capture_output=True,
                timeout=PATIENCE_SECONDS,
            )
            assert told.returncode == 0, told.stderr
    own = (f"--root-cert={ours.root}", f"--client-cert={ours.certificate}", f"--client-key={ours.key}")
    status = command("status", "--once", f"--url=localhost:{served.server.port}", "--tls", *own)
    assert status.status == 0, status.err
    assert "add_sub" in status.out


def test_handshakes_that_never_end_keep_nobody_out(served: Served, ours: Authority) -> None:
    for port, path in ports(served):
        silent = [socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS) for _ in range(70)]
        assert get(port, path, ours, ours) == 200
        for connection in silent:
            connection.close()


def test_a_renewed_certificate_is_used_for_new_connections_and_a_broken_one_is_not(
    served: Served, ours: Authority, theirs: Authority
) -> None:
    pair = (ours.root.read_bytes(), ours.key.read_bytes(), ours.certificate.read_bytes())
    channel = grpc.secure_channel(
        f"localhost:{served.server.port}",
        grpc.ssl_channel_credentials(*pair),
        (("grpc.use_local_subchannel_pool", 1),),
    )
    live = channel.unary_unary(LIVE)
    assert live(b"", timeout=PATIENCE_SECONDS)
    open_connection = http.client.HTTPSConnection(
        "localhost", served.server.http_port, timeout=PATIENCE_SECONDS, context=trusting(ours, ours)
    )
    open_connection.request("GET", "/v2/health/live")
    assert open_connection.getresponse().read() == b'{"live":true}'
    try:
        # A certificate without its key, a missing one, and an invalid one: the previous pair stays in use.
        for break_one in (
            lambda: shutil.copy(theirs.certificate, served.files.certificate),
            served.files.key.unlink,
            lambda: served.files.certificate.write_text("no certificate"),
        ):
            break_one()
            for port, path in ports(served):
                assert get(port, path, ours, ours) == 200
            assert grpc_is_served(served, ours, ours)
        wait_until(lambda: "cannot use the renewed certificate" in served.server.log_text, "the reason in the log")
        put(theirs, served.files)
        for port, path in ports(served):
            assert {get(port, path, theirs, theirs) for _ in range(CONNECTIONS)} == {200}
            with pytest.raises(ssl.SSLCertVerificationError):
                get(port, path, ours, theirs)
            if is_mutual(served):
                with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
                    get(port, path, theirs, ours)
        assert all(grpc_is_served(served, theirs, theirs) for _ in range(CONNECTIONS))
        assert not grpc_is_served(served, ours, theirs)
        assert grpc_is_served(served, theirs, ours) is not is_mutual(served)
        open_connection.request("GET", "/v2/health/live")
        assert open_connection.getresponse().status == 200
        assert live(b"", timeout=PATIENCE_SECONDS)
    finally:
        open_connection.close()
        channel.close()
        put(ours, served.files)
    assert get(served.server.http_port, "/v2/health/live", ours, ours) == 200


@pytest.mark.parametrize(
    ("flags", "choices"),
    [
        (
            ("--grpc-use-ssl-mutual", "--http-address=0.0.0.0"),
            "HTTP at 0.0.0.0:0 would serve the same to anybody. Choose: --http-use-ssl-mutual (with the same"
            " certificates), --http-address=127.0.0.1, --allow-http=false, or --allow-mixed-tls",
        ),
        (("--grpc-use-ssl-mutual", "--http-address=0.0.0.0", "--http-use-ssl"), "HTTP at 0.0.0.0:0 would serve"),
        (("--http-use-ssl-mutual", "--grpc-address=0.0.0.0"), "gRPC at 0.0.0.0:0 would serve"),
    ],
)
def test_a_lock_on_one_of_two_doors_is_refused(
    flags: tuple[str, ...], choices: str, ours: Authority, repository: Path, command: Command
) -> None:
    refused = command(
        *("serve", f"--model-repository={repository}", "--grpc-port=0", "--http-port=0", "--grpc-address=127.0.0.1"),
        *("--http-address=127.0.0.1", "--allow-metrics=false", f"--grpc-server-cert={ours.certificate}"),
        *(f"--grpc-server-key={ours.key}", f"--grpc-root-cert={ours.root}", *flags),
    )
    assert refused.status == 2, refused.err
    assert choices in " ".join(refused.err.split())


def test_a_pair_that_does_not_belong_together_ends_the_start(
    ours: Authority, theirs: Authority, repository: Path
) -> None:
    words = (
        *(sys.executable, "-m", "rocserve.cli", "serve", f"--model-repository={repository}"),
        *("--allow-grpc=false", "--http-port=0"),
        *("--http-address=127.0.0.1", "--http-use-ssl", "--allow-metrics=false"),
        *(f"--grpc-server-cert={ours.certificate}", f"--grpc-server-key={theirs.key}"),
    )
    refused = subprocess.run(words, check=False, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert refused.returncode == 1
    assert "cannot serve HTTP with TLS: expected a matching certificate and key as PEM files" in refused.stderr
