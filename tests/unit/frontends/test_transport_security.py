"""TLS and mutual TLS, with certificates made for the occasion by the openssl command."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.certificates import Authority, make_authority

from rocserve.frontends.grpc.transport import UnaryCall, UnaryRoute

UNARY = "/test.Service/Unary"


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> tuple[Authority, Authority]:
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command is missing")
    folder = tmp_path_factory.mktemp("certificates")
    return make_authority(folder / "ours"), make_authority(folder / "theirs")


def echo(call: UnaryCall) -> None:
    call.reply(call.message)


def answer(port: int, trusted: Authority, shown: Authority | None = None) -> bytes:
    credentials = grpc.ssl_channel_credentials(
        trusted.root.read_bytes(),
        shown.key.read_bytes() if shown else None,
        shown.certificate.read_bytes() if shown else None,
    )
    options = (
        ("grpc.ssl_target_name_override", "localhost"),
        ("grpc.use_local_subchannel_pool", 1),
    )
    with grpc.secure_channel(f"127.0.0.1:{port}", credentials, options) as channel:
        result: bytes = channel.unary_unary(UNARY)(b"secret", timeout=10)
        return result


def tls(authority: Authority, **more: Any) -> dict[str, Any]:
    return {"use_ssl": True, "server_cert": authority.certificate, "server_key": authority.key, **more}


def test_tls_serves_who_trusts_the_certificate_and_nobody_else(
    serve: Any, authorities: tuple[Authority, Authority]
) -> None:
    ours, theirs = authorities
    served = serve({UNARY: UnaryRoute(echo)}, **tls(ours))
    assert answer(served.port, ours) == b"secret"
    with pytest.raises(grpc.RpcError) as raised:
        answer(served.port, theirs)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(grpc.RpcError) as raised:
        served.unary()(b"plain", timeout=10)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert answer(served.port, ours) == b"secret"


def test_mutual_tls_serves_only_clients_with_a_certificate_that_is_vouched_for(
    serve: Any, authorities: tuple[Authority, Authority]
) -> None:
    ours, theirs = authorities
    served = serve({UNARY: UnaryRoute(echo)}, **tls(ours, use_ssl_mutual=True, root_cert=ours.root))
    assert answer(served.port, ours, shown=ours) == b"secret"
    for shown in (None, theirs):
        with pytest.raises(grpc.RpcError) as raised:
            answer(served.port, ours, shown)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_certificate_that_is_not_there_is_said(serve: Any, tmp_path: Path) -> None:
    missing = tmp_path / "missing.pem"
    with pytest.raises(FileNotFoundError, match=r"missing\.pem"):
        serve({UNARY: UnaryRoute(echo)}, use_ssl=True, server_cert=missing, server_key=missing)


def test_a_certificate_that_is_none_is_said(serve: Any, tmp_path: Path) -> None:
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("no certificate")
    with pytest.raises(OSError, match=r"PEM.*nonsense\.pem"):
        serve({UNARY: UnaryRoute(echo)}, use_ssl=True, server_cert=nonsense, server_key=nonsense)


def renew(place: Authority, with_: Authority) -> None:
    """As certificate managers do: each file is replaced by a rename."""
    for old, new in zip(
        (place.root, place.certificate, place.key), (with_.root, with_.certificate, with_.key), strict=True
    ):
        fresh = old.with_suffix(".fresh")
        shutil.copyfile(new, fresh)
        fresh.rename(old)


@pytest.fixture
def place(tmp_path: Path, authorities: tuple[Authority, Authority]) -> Authority:
    """Where the server's certificates are; ours at first."""
    place = Authority(tmp_path / "root.pem", tmp_path / "cert.pem", tmp_path / "cert.key")
    renew(place, authorities[0])
    return place


def refused(port: int, trusted: Authority, shown: Authority | None = None) -> bool:
    with pytest.raises(grpc.RpcError) as raised:
        answer(port, trusted, shown)
    return raised.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_renewed_certificate_is_shown_and_open_connections_stay(
    serve: Any, authorities: tuple[Authority, Authority], place: Authority
) -> None:
    ours, theirs = authorities
    served = serve({UNARY: UnaryRoute(echo)}, **tls(place))
    credentials = grpc.ssl_channel_credentials(ours.root.read_bytes())
    options = (("grpc.ssl_target_name_override", "localhost"), ("grpc.use_local_subchannel_pool", 1))
    with grpc.secure_channel(f"127.0.0.1:{served.port}", credentials, options) as channel:
        call = channel.unary_unary(UNARY)
        assert call(b"before", timeout=10) == b"before"
        renew(place, theirs)
        assert answer(served.port, theirs) == b"secret"
        assert refused(served.port, ours)
        assert call(b"after", timeout=10) == b"after"


def test_a_renewed_root_decides_about_clients(
    serve: Any, authorities: tuple[Authority, Authority], place: Authority
) -> None:
    ours, theirs = authorities
    served = serve({UNARY: UnaryRoute(echo)}, **tls(ours, use_ssl_mutual=True, root_cert=place.root))
    assert answer(served.port, ours, shown=ours) == b"secret"
    assert refused(served.port, ours, shown=theirs)
    renew(place, theirs)
    assert answer(served.port, ours, shown=theirs) == b"secret"
    assert refused(served.port, ours, shown=ours)


def test_half_a_renewal_changes_nothing_until_the_other_half_comes(
    serve: Any, authorities: tuple[Authority, Authority], place: Authority
) -> None:
    ours, theirs = authorities
    served = serve({UNARY: UnaryRoute(echo)}, **tls(place))
    shutil.copyfile(theirs.certificate, place.certificate)
    assert answer(served.port, ours) == b"secret"
    place.key.unlink()
    assert answer(served.port, ours) == b"secret"
    place.certificate.write_text("no certificate")
    assert answer(served.port, ours) == b"secret"
    renew(place, theirs)
    assert answer(served.port, theirs) == b"secret"
