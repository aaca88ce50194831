from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest

from rocserve_client import Tls, Unavailable


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A self-signed certificate for localhost: the paths of its key and of itself."""
    key, certificate = folder / f"{name}.key", folder / f"{name}.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    return key, certificate


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates of this test")
def test_mutual_tls(call: Any, loopback: Any, serve: Any, tmp_path: Path) -> None:
    server_key, server_certificate = make_certificate(tmp_path, "server")
    client_key, client_certificate = make_certificate(tmp_path, "client")
    credentials = grpc.ssl_server_credentials(
        [(server_key.read_bytes(), server_certificate.read_bytes())],
        root_certificates=client_certificate.read_bytes(),
        require_client_auth=True,
    )
    serve(loopback, credentials)
    mutual = Tls(server_certificate, client_key, client_certificate)
    assert call(loopback.address, "server_live", connection={"tls": mutual}, timeout=10)
    for refused in (Tls(server_certificate), Tls(client_certificate, client_key, client_certificate), None):
        with pytest.raises(Unavailable):
            call(loopback.address, "server_live", connection={"tls": refused}, timeout=10)
