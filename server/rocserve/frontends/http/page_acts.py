"""Lets operators act on the page: only clients that may make the same admin call over HTTP, only from the page itself.

A browser sends requests of any site to this server. So an act needs a token, which other sites cannot read, and the
browser's headers must say that it comes from the server's own page. A foreign site whose name is made to lead to this
machine (DNS rebinding) is its own page to the browser: so without a secret or TLS, the server must be called by an
address, `localhost` or the machine's name, which no foreign site has."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import Any

from rocserve.core.errors import ServeError, StatusCode, invalid_argument
from rocserve.core.request_memory import Holding
from rocserve.frontends.http.inference import HttpParts
from rocserve.frontends.http.json_text import checked_text, find, json_bytes, parse_json, shown_json
from rocserve.frontends.http.request import JSON, Head, HttpError, Request, Response, error_response
from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.protocol import page_pb2
from rocserve.protocol.json_form import plain_values
from rocserve.services.access import Access, Peer, ip_address_of

_ADMIN_CALLS: Mapping[str, str] = {
    "reload": "RepositoryModelLoad",
    "unload": "RepositoryModelUnload",
    "log": "RepositoryModelLoad",
    "verbosity": "LogSettings",
}
"""Act -> the admin call that a client must be allowed to make."""
PRIVATE = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
"""For texts of the server's operators, such as comments in a configuration."""


class PageActs:
    """Answers /v2/page/acts: GET says what the client may do, POST does it."""

    def __init__(self, parts: HttpParts, access: Access, check_secret: Callable[[Head, str], None]) -> None:
        """`check_secret`: raises HttpError if a head lacks the secret of a method."""
        self._parts = parts
        self._access = access
        self._check_secret = check_secret
        self._own_names = {"localhost", socket.gethostname().lower(), socket.gethostname().partition(".")[0].lower()}

    def answer(self, request: Request) -> None:
        request.run(self._do(request) if request.head.method == "POST" else self._tell(request))

    async def _tell(self, request: Request) -> Response:
        refusals: dict[str, str] = {}
        for act in _ADMIN_CALLS:
            try:
                self._check(act, request)
                refusals[act] = ""
            except (ServeError, HttpError) as error:
                refusals[act] = error.text
        told: dict[str, Any] = {"token": "", "refusals": refusals}
        if not all(refusals.values()):
            answer = self._parts.methods["Acts"].answer(page_pb2.ActsRequest())
            told |= plain_values(answer if isinstance(answer, page_pb2.ActsResponse) else await answer)
        return Response(200, json_bytes(told), JSON, PRIVATE)

    async def _do(self, request: Request) -> Response:
        holding = Holding()
        try:
            body = parse_json(await self._parts.bodies.read(request, holding))
            given, name, level = (find(body, key) for key in ("act", "name", "level"))
            if type(given) is not str or given not in _ADMIN_CALLS:
                expected = f'{{"act": ...}} with one of {", ".join(_ADMIN_CALLS)}'
                raise invalid_argument(f"expected {expected}, got {shown_json(given)}")
            act = given
            if act == "verbosity":
                if type(level) is not int:
                    raise invalid_argument(f'expected "level": N, the verbosity of the log, got {shown_json(level)}')
            elif type(name) is not str or not name:
                raise invalid_argument(f'expected "name": "MODEL", got {shown_json(name)}')
            self._check(act, request)
            message = page_pb2.ActRequest(
                token=request.head.headers.get("x-rocserve-token", ""),
                act=act,
                name="" if act == "verbosity" else checked_text(name),
                level=max(-1, min(level, 1 << 31)) if act == "verbosity" else 0,
                address=request.remote or "an unknown address",
            )
            doing = self._parts.methods["Act"].answer(message)
            request.continue_without_client()
            return Response(200, json_bytes(plain_values(await doing)), JSON, PRIVATE)
        except ServeError as error:
            return error_response(error)
        finally:
            self._parts.memory.requests.release(holding)

    def _check(self, act: str, request: Request) -> None:
        """Raise HttpError or ServeError (PERMISSION_DENIED) if the client may not do this here."""
        head, method = request.head, _ADMIN_CALLS[act]
        self._check_secret(head, method)
        self._check_own_page(head, method)
        # That a browser sends it does not matter: it is the server's own page.
        peer = Peer.of(request.remote, head.headers.keys() - {"origin"})
        self._access.check_admin(method, peer, _changing_settings)

    def _check_own_page(self, head: Head, method: str) -> None:
        host, origin = head.headers.get("host", ""), head.headers.get("origin")
        site = head.headers.get("sec-fetch-site", "same-origin")
        if (origin is not None and origin not in (f"http://{host}", f"https://{host}")) or site != "same-origin":
            came = origin or f"a page of another kind (Sec-Fetch-Site: {site})"
            raise _denied(f"expected a request of the server's own page, got one of {came}")
        if method in self._access.restrictions or self._parts.settings.use_ssl:
            return
        name = _name_of(host)
        if name.lower().rstrip(".") not in self._own_names and ip_address_of(name) is None:
            raise _denied(
                f"expected this machine's name, address or localhost in the page's URL, got '{name}', which may belong"
                " to another site; open the page by address, or protect admin calls with a secret header"
                " (--http-restricted-api)"
            )


def _name_of(host: str) -> str:
    """Return the host of a header Host, without its port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _changing_settings() -> pb.LogSettingsRequest:
    """Return a request that changes something, which is an admin call."""
    request = pb.LogSettingsRequest()
    request.settings["log_verbose_level"].uint32_param = 1
    return request


def _denied(reason: str) -> ServeError:
    return ServeError(StatusCode.PERMISSION_DENIED, f"{reason}; nothing was done")
