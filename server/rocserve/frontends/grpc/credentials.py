"""gRPC's credentials of a server, which follow the PEM files."""

from __future__ import annotations

import logging
from typing import Any

import grpc

from rocserve.frontends.certificates import CertificateFiles, CertificateReloader, Certificates


def server_credentials(files: CertificateFiles, log: logging.Logger) -> Any:
    """grpc.ServerCredentials that follow the files.

    Raises:
        OSError: a file cannot be read.
    """
    reloader = CertificateReloader(files, "gRPC", log)
    first = _configuration(reloader.first())

    def fetch() -> Any:
        renewed = reloader.renewed()
        return None if renewed is None else _configuration(renewed)

    return grpc.dynamic_ssl_server_credentials(first, fetch, files.root is not None)


def _configuration(certificates: Certificates) -> Any:
    pair = (certificates.private_key, certificates.certificate_chain)
    return grpc.ssl_server_certificate_configuration([pair], certificates.root)
