"""Acts of the page: which requests may act, by address, secret, token, origin and host; the errors of refused acts."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping
from ipaddress import ip_network
from typing import Any

import pytest

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.request_memory import RequestMemory
from rocserve.frontends.http.body import LargeBodies
from rocserve.frontends.http.inference import HttpParts
from rocserve.frontends.http.listener import HttpListener
from rocserve.frontends.http.service import HttpService
from rocserve.protocol import page_pb2
from rocserve.services.access import Access, Restriction
from rocserve.services.methods import Method
from rocserve.settings import AdminAddresses, HttpSettings

from .conftest import LOG, Connect, Listen

LOCAL = AdminAddresses(local=True)
OTHERS = AdminAddresses(networks=(ip_network("10.0.0.0/8"),))
ANYBODY = AdminAddresses(anybody=True)
Ask = Callable[..., Any]


class Server:
    """Answers requests as a server whose acts are recorded."""

    def __init__(self, listen: Listen, connect: Connect) -> None:
        self.listen, self.connect = listen, connect
        self.done: list[page_pb2.ActRequest] = []

    async def act(self, request: page_pb2.ActRequest) -> page_pb2.ActResponse:
        if request.token != "right":
            raise ServeError(StatusCode.PERMISSION_DENIED, "expected this server's token")
        self.done.append(request)
        return page_pb2.ActResponse()

    async def start(self, addresses: AdminAddresses | None, restrictions: Mapping[str, Restriction]) -> None:
        methods = {
            "Acts": Method(page_pb2.ActsRequest, lambda request: page_pb2.ActsResponse(token="right")),
            "Act": Method(page_pb2.ActRequest, self.act, is_slow=True),
        }
        inference: Any = None
        settings = HttpSettings(allow_ui=True, cors_origins=("http://friend.example",))
        parts = HttpParts(inference, methods, lambda *_: None, RequestMemory(), LargeBodies(), settings)
        service = HttpService(parts, Access(restrictions, addresses, restrictions), LOG)
        self.port = await self.listen(HttpListener(service.handle, LOG, failure=service.failure))

    async def ask(self, method: str, body: Any = None, host: str = "", **headers: str) -> tuple[int, Any]:
        content = b"" if body is None else json.dumps(body).encode()
        lines = [f"{method} /v2/page/acts HTTP/1.1", f"Host: {host or f'127.0.0.1:{self.port}'}", "Connection: close"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        head = "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""]).encode()
        reader, _ = await self.connect(self.port, head + content)
        answer_head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
        return int(answer_head.split()[1]), json.loads(answer) if answer else None


@pytest.fixture
async def server(listen: Listen, connect: Connect) -> Server:
    found = Server(listen, connect)
    await found.start(LOCAL, {})
    return found


RELOAD = {"act": "reload", "name": "m"}


async def test_the_servers_own_page_acts(server: Server) -> None:
    origin = f"http://127.0.0.1:{server.port}"
    status, told = await server.ask("GET", Sec_Fetch_Site="same-origin")
    assert (status, told["token"], set(told["refusals"].values())) == (200, "right", {""})
    assert set(told["refusals"]) == {"reload", "unload", "log", "verbosity"}
    for body in (RELOAD, {"act": "verbosity", "level": 1}):
        own = {"Origin": origin, "Sec_Fetch_Site": "same-origin", "X_Rocserve_Token": "right"}
        assert (await server.ask("POST", body, **own))[0] == 200
    assert [(one.act, one.name, one.level, one.address) for one in server.done] == [
        ("reload", "m", 0, "127.0.0.1"),
        ("verbosity", "", 1, "127.0.0.1"),
    ]


@pytest.mark.parametrize(
    ("host", "headers"),
    [
        ("", {"Origin": "http://evil.example"}),
        ("", {"Origin": "http://friend.example"}),
        ("", {"Origin": "null"}),
        ("", {"Origin": "http://127.0.0.1:1"}),
        ("", {"Origin": "http://127.0.0.1"}),
        ("", {"Sec_Fetch_Site": "cross-site"}),
        ("", {"Sec_Fetch_Site": "same-site"}),
        # A site whose name was made to lead here is its own page to the browser.
        ("evil.example", {"Origin": "http://evil.example"}),
        ("evil.example:8000", {"Origin": "http://evil.example:8000", "Sec_Fetch_Site": "same-origin"}),
        ("127.0.0.1.evil.example", {}),
        ("localhost.evil.example:80", {}),
        # A proxy speaks for others.
        ("", {"X_Forwarded_For": "127.0.0.1"}),
        ("", {"Forwarded": "for=127.0.0.1"}),
    ],
)
async def test_others_get_no_token_and_cannot_use_it(server: Server, host: str, headers: Mapping[str, str]) -> None:
    status, told = await server.ask("GET", host=host, **headers)
    assert (status, told["token"]) == (200, "")
    assert "log_verbose_level" not in told
    assert all(told["refusals"].values())
    status, answer = await server.ask("POST", RELOAD, host, X_Rocserve_Token="right", **headers)
    assert status == 403
    assert answer["error"]
    assert not server.done


@pytest.mark.parametrize("headers", [{}, {"X_Rocserve_Token": ""}, {"X_Rocserve_Token": "wrong"}])
async def test_without_the_token_nothing_is_done(server: Server, headers: Mapping[str, str]) -> None:
    assert (await server.ask("POST", RELOAD, **headers))[0] == 403
    assert not server.done


@pytest.mark.parametrize("host", ["localhost:8000", "LOCALHOST", "[::1]:8000", "10.1.2.3:8000", socket.gethostname()])
async def test_names_that_no_foreign_site_has(server: Server, host: str) -> None:
    assert (await server.ask("POST", RELOAD, host, Origin=f"http://{host}", X_Rocserve_Token="right"))[0] == 200


async def test_an_address_that_may_not_call_admin_methods(listen: Listen, connect: Connect) -> None:
    server = Server(listen, connect)
    await server.start(OTHERS, {})
    _, told = await server.ask("GET")
    assert told["token"] == ""
    assert all("which this server takes from 10.0.0.0/8" in text for text in told["refusals"].values())
    assert (await server.ask("POST", RELOAD, X_Rocserve_Token="right"))[0] == 403
    assert (await server.ask("POST", {"act": "verbosity", "level": 1}, X_Rocserve_Token="right"))[0] == 403
    assert not server.done


async def test_a_secret_is_asked_for_and_then_any_name_will_do(listen: Listen, connect: Connect) -> None:
    server = Server(listen, connect)
    admin = Restriction("Admin-Key", "secret")
    await server.start(None, {"RepositoryModelLoad": admin})
    _, told = await server.ask("GET")
    assert told["refusals"]["reload"] == "This API is restricted, expecting header 'Admin-Key'"
    assert told["refusals"]["unload"] == ""
    token = {"X_Rocserve_Token": "right"}
    assert (await server.ask("POST", RELOAD, **token))[0] == 403
    assert (await server.ask("POST", RELOAD, Admin_Key="wrong", **token))[0] == 403
    assert not server.done
    name = "gpu.example:8000"
    assert (await server.ask("POST", RELOAD, name, Admin_Key="secret", Origin=f"http://{name}", **token))[0] == 200
    assert (await server.ask("POST", {"act": "unload", "name": "m"}, name, **token))[0] == 403
    assert len(server.done) == 1


async def test_anybody_may_act_only_from_the_servers_own_page(listen: Listen, connect: Connect) -> None:
    server = Server(listen, connect)
    await server.start(ANYBODY, {})
    assert (await server.ask("POST", RELOAD, X_Rocserve_Token="right"))[0] == 200
    for host, headers in (("", {"Origin": "http://evil.example"}), ("evil.example", {})):
        assert (await server.ask("POST", RELOAD, host, X_Rocserve_Token="right", **headers))[0] == 403
    assert len(server.done) == 1


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"act": "format"},
        {"act": []},
        {"act": None},
        [],
        "reload",
        {"act": "reload"},
        {"act": "reload", "name": 5},
        {"act": "unload", "name": ""},
        {"act": "log", "name": None},
        {"act": "verbosity"},
        {"act": "verbosity", "level": "1"},
        {"act": "verbosity", "level": True},
    ],
)
async def test_what_is_no_act(server: Server, body: Any) -> None:
    status, answer = await server.ask("POST", body, X_Rocserve_Token="right")
    assert status == 400
    assert answer["error"].startswith("expected ")
    assert not server.done


async def test_no_body(server: Server) -> None:
    status, answer = await server.ask("POST", None, X_Rocserve_Token="right")
    assert status == 500
    assert answer["error"].startswith("failed to parse the request JSON buffer")
    assert not server.done


async def test_other_verbs(server: Server) -> None:
    assert (await server.ask("DELETE"))[0] == 405
