"""Checks that the flags of TLS go together: certificates where they are needed, and no door beside the locked one."""

from __future__ import annotations

import ipaddress

from rocserve.settings import GrpcSettings, HttpSettings, ServerSettings


class FlagError(Exception):
    """The command line cannot be served; the text says why and what to do."""


def check_tls(settings: ServerSettings) -> None:
    """Raises: FlagError."""
    ports = [part for part in (settings.grpc, settings.http, settings.metrics) if part.allow]
    _check_certificates(
        settings.grpc,
        is_used=any(port.use_ssl or port.use_ssl_mutual for port in ports),
        checks_clients=any(port.use_ssl_mutual for port in ports),
    )
    if not settings.allow_mixed_tls:
        _check_mixture("gRPC", "grpc", settings.grpc, "HTTP", "http", settings.http)
        _check_mixture("HTTP", "http", settings.http, "gRPC", "grpc", settings.grpc)


def _check_certificates(grpc: GrpcSettings, is_used: bool, checks_clients: bool) -> None:
    files = {"server-cert": grpc.server_cert, "server-key": grpc.server_key, "root-cert": grpc.root_cert}
    for name, path in files.items():
        if path is not None and not path.is_file():
            raise FlagError(f"--grpc-{name}={path}: there is no such file")
    if is_used and not (grpc.server_cert and grpc.server_key):
        raise FlagError("TLS needs --grpc-server-cert and --grpc-server-key, which are for all ports")
    if checks_clients and not grpc.root_cert:
        raise FlagError(
            "--grpc-use-ssl-mutual, --http-use-ssl-mutual and --metrics-use-ssl-mutual need --grpc-root-cert to check"
            " clients' certificates against"
        )


def _check_mixture(
    locked: str,
    locked_flag: str,
    locked_port: GrpcSettings | HttpSettings,
    other: str,
    flag: str,
    port: GrpcSettings | HttpSettings,
) -> None:
    """Who locks one port takes the other, which serves the same, easily for locked."""
    if not (locked_port.allow and locked_port.use_ssl_mutual) or not port.allow or port.use_ssl_mutual:
        return
    if not _is_loopback(port.address):
        raise FlagError(
            f"--{locked_flag}-use-ssl-mutual admits to {locked} only clients that show a certificate, but {other} at"
            f" {port.address}:{port.port} would serve the same to anybody. Choose: --{flag}-use-ssl-mutual (with the"
            f" same certificates), --{flag}-address=127.0.0.1, --allow-{flag}=false, or --allow-mixed-tls where that"
            " is meant"
        )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
