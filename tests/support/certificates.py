"""Makes certificates with the openssl command."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Authority:
    """A certificate authority, and a certificate for localhost that the authority has signed."""

    root: Path
    certificate: Path
    key: Path


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)


def make_authority(folder: Path) -> Authority:
    folder.mkdir()
    root, root_key = folder / "root.pem", folder / "root.key"
    certificate, key, request, extension = (folder / name for name in ("cert.pem", "cert.key", "request", "extension"))
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *curve, "-keyout", root_key, "-out", root, "-days", "2", "-subj", f"/CN={folder.name}")
    openssl("req", *curve, "-keyout", key, "-out", request, "-subj", "/CN=localhost")
    extension.write_text("subjectAltName=DNS:localhost\n")
    signing = ("-CA", root, "-CAkey", root_key, "-CAcreateserial", "-days", "2", "-extfile", extension)
    openssl("x509", "-req", "-in", request, *signing, "-out", certificate)
    return Authority(root, certificate, key)
