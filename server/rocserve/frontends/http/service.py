"""Serves HTTP as the settings say: its listener, the handlers of requests, access checks, and the page at /."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib import resources
from types import MappingProxyType
from typing import Any, NamedTuple

from google.protobuf.message import Message

from rocserve.core.errors import ServeError, invalid_argument, unavailable
from rocserve.core.printable import printable_name, shortened
from rocserve.core.request_memory import Holding
from rocserve.frontends.http.body import HEADER_LENGTH, LARGE_JSON
from rocserve.frontends.http.connection import ConnectionLimits
from rocserve.frontends.http.divided_call import MOST_IN_FLIGHT
from rocserve.frontends.http.generate import EVENT_STREAM, generate
from rocserve.frontends.http.infer_stream import infer_stream
from rocserve.frontends.http.inference import HttpParts, InferHead
from rocserve.frontends.http.json_text import json_bytes
from rocserve.frontends.http.listener import HttpListener, most_descriptors
from rocserve.frontends.http.openai.errors import openai_error
from rocserve.frontends.http.openai.models import TextModels
from rocserve.frontends.http.openai.service import OpenAiService
from rocserve.frontends.http.page_acts import PRIVATE, PageActs
from rocserve.frontends.http.request import (
    JSON,
    PLAIN,
    Head,
    HttpError,
    Request,
    Response,
    error_response,
    not_allowed,
    query_of,
)
from rocserve.frontends.http.rest_v1.service import RestV1Service
from rocserve.frontends.http.routes import (
    EMBED,
    GENERATE,
    GENERATE_STREAM,
    GET_OR_HEAD,
    GET_OR_POST,
    INFER,
    MODEL_V1,
    MODELS_V1,
    PREDICT,
    RERANK,
    RERANK_2,
    VERSION_V1,
    Route,
    find_destination,
    health_response,
    is_openai,
    is_rest_v1,
    parse_message,
)
from rocserve.frontends.listen_address import ListenAddress
from rocserve.frontends.tls import tls_context
from rocserve.observability.failures import RequestFailures
from rocserve.protocol import page_pb2
from rocserve.protocol.json_form import plain_values
from rocserve.services.access import Access, Peer, Restriction
from rocserve.settings import ServerSettings


class HttpService:
    """Answers requests, on the event loop that it is made on."""

    def __init__(self, parts: HttpParts, access: Access, log: logging.Logger, most_in_flight: int = 0) -> None:
        """`most_in_flight`: infer requests that one client may have at once; 0 = any number."""
        self._parts = parts
        at_once = min(MOST_IN_FLIGHT, most_in_flight or MOST_IN_FLIGHT)
        text_models = TextModels(parts)
        self._openai = OpenAiService(parts, text_models, at_once)
        self._rest_v1 = RestV1Service(parts, text_models, at_once)
        self._failures = RequestFailures(log)
        self._access = access
        self._page = Page(parts, access) if parts.settings.allow_ui else None
        self._origins = frozenset(parts.settings.cors_origins)

    def failure(self, request: Request, error: Exception) -> Response:
        """Return the answer to a request that was refused, or in which the server failed."""
        if not isinstance(error, ServeError | HttpError):
            error = self._failures.error_of(f"{request.head.method} {request.head.path}", error)
        return openai_error(error) if is_openai(request.head.target) else error_response(error)

    def handle(self, request: Request) -> None:
        """Answer a request, immediately or later. If this raises an exception, the answer is `failure`."""
        head = request.head
        if head.handle is None:
            head.handle = self._handler(head)
        head.handle(request)

    def _handler(self, head: Head) -> Callable[[Request], None]:
        """Return the handler for requests with this head. Raises HttpError if they are refused."""
        origin = head.headers.get("origin")
        if origin is not None and self._origins.intersection((origin, "*")):
            # Without Access-Control-Allow-Credentials, browsers send no cookies or passwords.
            head.answer_headers = {
                "Access-Control-Allow-Origin": origin,
                "Access-Control-Expose-Headers": HEADER_LENGTH,
                "Vary": "Origin",
            }
            if head.method == "OPTIONS" and "access-control-request-method" in head.headers:
                allowed = {
                    "Access-Control-Allow-Methods": "GET, HEAD, POST",
                    "Access-Control-Allow-Headers": "*, Authorization",  # Browsers do not count it among any headers.
                    "Access-Control-Max-Age": "600",
                }
                return lambda request: request.respond(Response(200, b"", PLAIN, allowed))
        destination = find_destination(head.target)
        if destination is None:
            part = None if self._page is None else self._page.parts.get(head.path)
            if part is None:
                raise HttpError(404, _unknown_url(head.target))
            if head.method not in part.verbs:
                raise not_allowed(part.verbs)
            return self._guarded(head, part.shows, lambda: part.answer)
        route, fields = destination
        return self._guarded(head, (route.method, *route.shows), lambda: self._answer_of(head, route, fields))

    def _guarded(
        self, head: Head, methods: Sequence[str], answer: Callable[[], Callable[[Request], None]]
    ) -> Callable[[Request], None]:
        """Return the handler that `answer` makes, if the head may call these methods. If a method's secret may be
        renewed, each request is checked again. Raises HttpError if the head may not call a method."""
        wanted = [self._access.restrictions[method] for method in methods if method in self._access.restrictions]
        takes_bearer = "ModelInfer" in methods
        _check_admitted(head, wanted, takes_bearer)
        given = answer()
        renewed = [restriction for restriction in wanted if restriction.may_be_renewed]
        if not renewed:
            return given

        def guarded(request: Request) -> None:
            _check_admitted(head, renewed, takes_bearer)
            given(request)

        return guarded

    def _answer_of(self, head: Head, route: Route, fields: Mapping[str, str]) -> Callable[[Request], None]:
        if head.method not in route.verbs:
            raise not_allowed(route.verbs)
        if route is INFER:
            return InferHead(self._parts, head.headers, fields["name"], fields["version"], infer_stream).answer
        if route is GENERATE or route is GENERATE_STREAM:
            model, version, streams = fields["name"], fields["version"], route is GENERATE_STREAM
            return lambda request: request.run(generate(self._parts, request, model, version, streams))
        if route is EMBED:
            return lambda request: request.run(self._openai.embed(request))
        if route is RERANK or route is RERANK_2:
            return lambda request: request.run(self._openai.rerank(request))
        if route is MODELS_V1:
            return lambda request: request.run(self._openai.list_models())
        if route is MODEL_V1:
            return lambda request: request.run(self._rest_v1.show_model(fields["name"]))
        if route is VERSION_V1:
            return lambda request: request.run(self._rest_v1.show_version(fields["name"], fields["version"]))
        if route is PREDICT:
            return lambda request: request.run(self._rest_v1.predict(request, fields["name"], fields["version"]))
        return lambda request: request.run(self._manage(request, route, fields))

    async def _manage(self, request: Request, route: Route, fields: Mapping[str, str]) -> Response:
        method = self._parts.methods[route.method]
        holding = Holding()
        try:
            body = await self._parts.bodies.read(request, holding) if request.head.method == "POST" else None
            serialised: bytes | None = None
            if body is not None and len(body) > LARGE_JSON:
                parse = partial(parse_message, request.head.target)
                serialised = await self._parts.large.parse(parse, body)
            peer = Peer.of(request.remote, request.head.headers)
            if serialised is not None and method.answer_serialised is not None:
                self._access.check_admin(route.method, peer, partial(method.request.FromString, serialised))
                response = method.answer_serialised(serialised)
            else:
                read = route.request(fields, body) if serialised is None else method.request.FromString(serialised)
                self._access.check_admin(route.method, peer, lambda: read)
                response = method.answer(read)
            if isinstance(response, Awaitable):
                request.continue_without_client()
                response = await response
            if route.to_json is health_response:
                health: Response = health_response(response, fields.get("name", ""))
                return health
            answer = None if route.to_json is None else route.to_json(response)
        except ServeError as error:
            return error_response(error)
        finally:
            self._parts.memory.requests.release(holding)
        text = b"" if answer is None else answer if isinstance(answer, bytes) else json_bytes(answer)
        return Response(200, text, route.content_type)


def _unknown_url(target: bytes) -> str:
    if is_rest_v1(target):
        return (
            "unknown URL; of TensorFlow Serving's API and KServe's v1 this server has POST"
            " /v1/models/NAME[/versions/N]:predict, GET /v1/models/NAME and GET /v1/models/NAME/versions/N"
        )
    if is_openai(target):
        return (
            "unknown URL; of OpenAI's API this server has POST /v1/embeddings, POST /v1/rerank, GET /v1/models and GET"
            " /v1/models/NAME: it serves models that read text, not models that generate it"
        )
    return "Not Found"


def _check_admitted(head: Head, wanted: Iterable[Restriction], takes_bearer: bool) -> None:
    """Raise HttpError (403) if the head lacks one of the secrets. `takes_bearer`: a secret may also be in the header
    Authorization, as OpenAI's clients send their key."""
    for restriction in wanted:
        if restriction.admits(head.headers.get(restriction.header.lower())):
            continue
        if not (takes_bearer and restriction.admits(_bearer_token(head))):
            raise HttpError(403, f"This API is restricted, expecting header '{restriction.header}'")


def _bearer_token(head: Head) -> str | None:
    sent = head.headers.get("authorization", "")
    bearer = "bearer "
    return sent[len(bearer) :].strip(" ") if sent[: len(bearer)].lower() == bearer else None


_MOST_STREAMS = 64
"""Open streams of one process. Unbounded, they could take all connections. The page works without streams, too."""


class PagePart(NamedTuple):
    answer: Callable[[Request], None]
    shows: tuple[str, ...] = ()
    """The methods whose answers are in this part. Clients that may not call all of them may not get the part."""
    verbs: frozenset[str] = GET_OR_HEAD


class Page:
    """Serves the page at /. `parts`: path -> a file, the overview of models, or the stream of events."""

    def __init__(self, parts: HttpParts, access: Access) -> None:
        self._methods = parts.methods
        self._open_streams = 0

        def check_secret(head: Head, method: str) -> None:
            if method in access.restrictions:
                _check_admitted(head, (access.restrictions[method],), takes_bearer=False)

        acts = PageActs(parts, access, check_secret)
        self.parts = {"/v2/page/acts": PagePart(acts.answer, verbs=GET_OR_POST)}
        for path, answer, shows in (
            ("/v2/overview", self._overview, ("RepositoryIndex", "ModelStatistics", "ModelMetadata")),
            ("/v2/server-state", self._server_state, ("ModelStatistics",)),
            ("/v2/load-report", self._load_report, ("RepositoryIndex", "ModelStatistics", "ModelConfig")),
            ("/v2/version-details", self._version_details, ("ModelStatistics", "ModelConfig")),
            ("/v2/ensemble-graph", self._ensemble_graph, ("RepositoryIndex", "ModelMetadata", "ModelConfig")),
            ("/v2/events", self._send_events, ("RepositoryIndex",)),
        ):
            self.parts[path] = PagePart(partial(_run, answer), shows)
        for path, file in _page_files():
            self.parts[path] = PagePart(partial(Request.respond, response=file))

    async def _overview(self, request: Request) -> Response:
        """Answer with the state of all models, or of those that the query names. A thread writes it, because hundreds
        of models take a while."""
        method, names = self._methods["Overview"], _query(request, "name").get("name", ())
        overview = await method.answer(page_pb2.OverviewRequest(names=names))
        return Response(200, await asyncio.to_thread(lambda: json_bytes(plain_values(overview))), JSON)

    async def _server_state(self, request: Request) -> Response:
        text = _query(request, "after").get("after", ["0"])[0]
        after = _number(text)
        if not after and text != "0":
            raise invalid_argument(f"expected a time in milliseconds as after, got '{shortened(text)}'")
        return await self._told("ServerState", page_pb2.ServerStateRequest(after_ms=after))

    async def _load_report(self, request: Request) -> Response:
        name, version = _row_of(request)
        return await self._told("LoadReport", page_pb2.LoadReportRequest(name=name, version=version), PRIVATE)

    async def _version_details(self, request: Request) -> Response:
        name, version = _row_of(request)
        return await self._told("VersionDetails", page_pb2.VersionDetailsRequest(name=name, version=version), PRIVATE)

    async def _ensemble_graph(self, request: Request) -> Response:
        query = _query(request, "name", "version", "width")
        name, version, text = (query.get(field, [""])[0] for field in ("name", "version", "width"))
        if text and not (text.isascii() and text.isdecimal() and len(text) < 6):
            raise invalid_argument(f"width: expected a number of pixels, got '{printable_name(text)}'")
        message = page_pb2.EnsembleGraphRequest(name=name, version=version, width=int(text or 0))
        return await self._told("EnsembleGraph", message)

    async def _told(self, method: str, message: Message, headers: Mapping[str, str] = MappingProxyType({})) -> Response:
        """Return the method's answer as JSON. Raises ServeError."""
        answer = await self._methods[method].answer(message)
        return Response(200, json_bytes(plain_values(answer)), JSON, headers)

    async def _send_events(self, request: Request) -> Response | None:
        """Send repository events with their numbers as server-sent events, until the client or the server ends, or the
        client must connect again, as browsers do. Raises ServeError if too many streams are open."""
        if self._open_streams >= _MOST_STREAMS:
            raise unavailable(f"{_MOST_STREAMS} event streams are open, the maximum; poll /v2/overview")
        if request.head.method == "HEAD":
            return Response(200, b"", EVENT_STREAM)
        method = self._methods["RepositoryEvents"]
        after = _number(request.head.headers.get("last-event-id", ""))
        self._open_streams += 1
        try:
            request.begin_stream(200, EVENT_STREAM, {"Cache-Control": "no-cache"})
            is_last = False
            while not is_last and not request.must_reconnect:
                response = await method.answer(page_pb2.RepositoryEventsRequest(after=after))
                is_last = response.is_last
                text = b""
                for event in response.events:
                    after = event.number
                    text += b"id: %d\ndata: %b\n\n" % (after, json_bytes(plain_values(event)))
                # Without an event, a comment is sent, so that a client that has gone is noticed.
                await request.send(text or b":\n\n")
        except ServeError:
            pass  # The server has no memory, or ends; the client will connect again.
        finally:
            self._open_streams -= 1
        request.end_stream()
        return None


def _run(answer: Callable[[Request], Coroutine[Any, Any, Response | None]], request: Request) -> None:
    request.run(answer(request))


def _page_files() -> Iterator[tuple[str, Response]]:
    """Yield the path and the answer of each file of the page."""
    content_types = {
        "html": "text/html; charset=utf-8",
        "js": "text/javascript; charset=utf-8",
        "css": "text/css; charset=utf-8",
        "json": JSON,
    }
    headers = {
        # Allows nothing from another origin, no inline script or style, and no text that becomes markup.
        "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
        " img-src 'self' blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
        " require-trusted-types-for 'script'; trusted-types 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    paths = {"index.html": "/", "openapi.json": "/openapi.json"}
    for file in (resources.files(__package__) / "page_files").iterdir():
        content_type = content_types[file.name.rpartition(".")[2]]
        path = paths.get(file.name, f"/ui/{file.name}")
        yield path, Response(200, file.read_bytes(), content_type, headers)


def _query(request: Request, *names: str) -> Mapping[str, Sequence[str]]:
    """Return name -> values of a request's query. Raises ServeError (INVALID_ARGUMENT) for another name."""
    query = query_of(request.head.target)
    for name in query.keys() - set(names):
        expected = " or ".join(names)
        raise invalid_argument(f"expected {expected} in the query, got '{shortened(name)}'")
    return query


def _row_of(request: Request) -> tuple[str, str]:
    """Return name and version of a query; "" for a missing one."""
    query = _query(request, "name", "version")
    return query.get("name", [""])[0], query.get("version", [""])[0]


def _number(text: str) -> int:
    """Return a client's number that fits a message; 0 for another text."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else 0


async def start_http(
    settings: ServerSettings, where: ListenAddress, parts: HttpParts, log: logging.Logger
) -> tuple[HttpListener, int]:
    """Start the listener, and return its port too. Raises OSError if it cannot listen, or cannot use a certificate."""
    http = settings.http
    service = HttpService(parts, Access.of(settings, http, log), log, settings.max_requests_per_client)
    tls = tls_context(settings.grpc, http, "HTTP", log)
    limits = ConnectionLimits(
        idle_seconds=http.keepalive_timeout_seconds,
        age_seconds=settings.max_connection_age_seconds,
        write_seconds=settings.write_timeout_seconds,
        # A connection with TLS takes 320 KiB, of which asyncio's buffer has 256. All may take as much as requests.
        most=None if tls is None else max(parts.memory.share_bytes // (320 << 10), 64),
        most_descriptors=most_descriptors(),
    )
    listener = HttpListener(service.handle, log, limits, tls, service.failure)
    return listener, await listener.start(where)
