"""HTTP/1.1 on a connection: bodies, order, refused headers, ends."""

from __future__ import annotations

import asyncio
import gc
import random
import re
import weakref

import pytest
from support.waiting import PATIENCE_SECONDS, until

from rocserve.frontends.http.connection import ConnectionLimits
from rocserve.frontends.http.listener import HttpListener
from rocserve.frontends.http.request import Request, Response

from .conftest import LOG, Connect, Listen

POST = b"POST /echo HTTP/1.1\r\nHost: x\r\n"
CLOSE = b"Connection: close\r\n"


async def echo(request: Request) -> Response:
    while not request.is_complete and request.fault is None:
        await request.wait_for_more()
    if request.fault is not None:
        return Response(400, request.fault.encode(), "text/plain")
    return Response(200, b"<%b>" % request.data, "text/plain", {"X-Method": request.head.method})


async def stream(request: Request) -> None:
    request.begin_stream(200, "text/plain")
    for part in (b"one", b"two"):
        await request.send(part)
    request.end_stream()


async def large(request: Request) -> None:
    await request.respond_in_parts([bytes(3 << 20), memoryview(b"end")], "text/plain")


def handle(request: Request) -> None:
    if request.head.path == "/echo":
        request.run(echo(request))
    elif request.head.path == "/stream":
        request.run(stream(request))
    elif request.head.path == "/large":
        request.run(large(request))
    elif request.head.path == "/late":
        asyncio.get_running_loop().call_later(0.1, request.respond, Response(200, b"late", "text/plain"))
    elif request.head.path == "/never":
        pass
    elif request.head.path == "/headers":
        request.respond(Response(200, repr((request.head.headers, request.head.pairs)).encode(), "text/plain"))
    elif request.head.path == "/fails":
        request.run(fail())
    elif request.head.path == "/breaks":
        request.run(fail(request))
    else:
        request.respond(Response(404, b"nothing here", "text/plain"))


async def fail(request: Request | None = None) -> Response:
    """`request`: the request whose answer has begun."""
    if request is not None:
        request.begin_stream(200, "text/plain")
        await request.send(b"begun")
    raise ValueError("a fault of the server")


def failure(request: Request, error: Exception) -> Response:
    return Response(500, str(error).encode(), "text/plain")


@pytest.fixture
async def port(listen: Listen) -> int:
    return await listen(HttpListener(handle, LOG, failure=failure))


async def exchange(port: int, *sent: bytes, pause: float = 0.02) -> bytes:
    """All that the server sends until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in sent:
        writer.write(part)
        await asyncio.sleep(pause)
    answer = await asyncio.wait_for(reader.read(), PATIENCE_SECONDS)
    writer.close()
    return answer


def body_of(answer: bytes) -> bytes:
    return answer.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize(
    "rest",
    [
        b"Content-Length: 5\r\n\r\nhello",
        b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;extension=1\r\nllo\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX-Trailer: 1\r\n\r\n",
        b"Upgrade: h2c\r\nContent-Length: 5\r\n\r\nhello",
    ],
    ids=["length", "chunks", "trailer", "upgrade"],
)
async def test_bodies_in_one_piece_and_byte_by_byte(rest: bytes, port: int) -> None:
    whole = await exchange(port, POST + CLOSE + rest)
    assert body_of(whole) == b"<hello>"
    assert b"X-Method: POST\r\n" in whole
    assert b"Content-Length: 7\r\n" in whole
    sent = POST + CLOSE + rest
    parts = [sent[index : index + 1] for index in range(len(sent))]
    assert body_of(await exchange(port, *parts, pause=0)) == b"<hello>"


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
async def test_a_request_that_asks_for_another_protocol_is_answered_in_this_one(protocol: bytes, port: int) -> None:
    """curl --http2 and Java's client send such requests."""
    head = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %b\r\nHTTP2-Settings: AAM\r\n" % protocol
    sent = POST + head + b"Content-Length: 5\r\n\r\nhello"
    for parts in ([sent], [sent[index : index + 1] for index in range(len(sent))], [KNOWN + sent]):
        answers = (await exchange(port, *parts, pause=0)).split(b"HTTP/1.1 ")[1:]
        assert body_of(answers[-1]) == b"<hello>"
        assert len(answers) == 1 + (parts[0][:3] == b"GET")
    followed = await exchange(port, sent + KNOWN)
    assert followed.count(b"HTTP/1.1 ") == 1, "what comes behind may be of the other protocol"
    chunked = await exchange(port, POST + head + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
    assert chunked.startswith(b"HTTP/1.1 400 ")
    assert b"must state its Content-Length" in chunked
    for end in (b"\r\n", CLOSE + b"\r\n"):
        assert body_of(await exchange(port, b"CONNECT x:1 HTTP/1.1\r\n" + end)) == b"nothing here"


async def test_spaces_around_a_value_are_none_of_it(port: int) -> None:
    sent = b"GET /headers HTTP/1.1\r\nOne: \t a b \t \r\nTwo:\r\nConnection: close \r\n\r\n"
    answer = await exchange(port, sent)
    pairs = [(b"One", b"a b"), (b"Two", b""), (b"Connection", b"close")]
    assert body_of(answer) == repr(({"one": "a b", "two": "", "connection": "close"}, pairs)).encode()


async def test_a_list_may_be_divided_into_lines(port: int) -> None:
    sent = b"GET /headers HTTP/1.1\r\nAccept: a\r\nOne: 1\r\naccept: b;q=0\r\nOne: 2\r\nConnection: close\r\n\r\n"
    answer = await exchange(port, sent)
    assert b"{'accept': 'a, b;q=0', 'one': '1', 'connection': 'close'}" in body_of(answer)


async def test_what_is_asked_at_once_is_answered_in_order(port: int) -> None:
    late = b"GET /late HTTP/1.1\r\n\r\n"
    many = POST + b"Content-Length: 1\r\n\r\n"
    sent = (
        late + b"".join(many + b"%d" % (number % 10) for number in range(60)) + b"GET / HTTP/1.1\r\n" + CLOSE + b"\r\n"
    )
    answer = await exchange(port, sent)
    bodies = [part.partition(b"\r\n\r\n")[2] for part in answer.split(b"HTTP/1.1 ")[1:]]
    assert bodies == [b"late", *(b"<%d>" % (number % 10) for number in range(60)), b"nothing here"]


KNOWN = b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n"
ALIKE = [
    (KNOWN, b"nothing here"),
    (POST + b"Content-Length: 5\r\n\r\nhello", b"<hello>"),
    (POST + b"Content-Length: 5\r\n\r\nother", b"<other>"),
    (POST + b"Content-Length: 0\r\n\r\n", b"<>"),
    (POST + b"Content-Length: %d\r\n\r\n" % len(KNOWN) + KNOWN, b"<%b>" % KNOWN),
    (POST + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(KNOWN), KNOWN), b"<%b>" % KNOWN),
    (b"\r\n" + POST + b"Content-Length: 5\r\n\r\nhello", b"<hello>"),
    (b"POST /echo HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nhi", b"<hi>"),
    (POST + b"X: %b\r\nContent-Length: 2\r\n\r\nhi" % (b"x" * 2000), b"<hi>"),
]


@pytest.mark.parametrize("seed", range(6))
async def test_a_head_says_the_same_each_time_it_comes(seed: int, port: int) -> None:
    chosen = random.Random(seed)
    asked = chosen.choices(ALIKE, k=40)
    sent = b"".join(request for request, _ in asked) + b"GET /nowhere HTTP/1.1\r\n" + CLOSE + b"\r\n"
    cuts = sorted(chosen.sample(range(len(sent)), 60))
    pieces = [sent[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(sent)], strict=True)]
    for parts in ([sent], [request for request, _ in asked] + [sent[-44:]], pieces, [sent]):
        answer = await exchange(port, *parts, pause=0.001)
        bodies = [answer.partition(b"\r\n\r\n")[2] for answer in re.split(rb"HTTP/1\.[01] (?=\d)", answer)[1:]]
        assert bodies == [*(body for _, body in asked), b"nothing here"]


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /echo HTTP/1.1\nContent-Length: 5\n\nab\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nContent-Length: 5\n\nab\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nContent-Length : 5\r\n\r\nhello",
        b"POST /echo HTTP/1.1\r\nContent-Length: 5 \r\n\r\nhello",
        b"POST /echo HTTP/1.1\r\nContent-Length: +5\r\n\r\nhello",
        b"POST /echo HTTP/1.1\r\nContent-Length:\r\n\r\nhello",
        b"POST /echo HTTP/1.1\r\nContent-Length: 5\r\n folded\r\n\r\nhello",
        b"POST /echo HTTP/1.1\r\nTransfer-Encoding: xchunked\r\nContent-Length: 5\r\n\r\nhello",
        b"POST /echo HTTP/1.1\r\nTransfer-Encoding: identity\r\n\r\nhello",
        b"CONNECT /echo HTTP/1.1\r\nHost: x\r\n\r\n" + KNOWN,
        b"GET /nowhere HTTP/1.1\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n" + KNOWN,
        b"GET /nowhere HTTP/1.1\r\n" + CLOSE + b"\r\n" + KNOWN,
    ],
)
async def test_what_heads_mean_does_not_depend_on_what_came_before(sent: bytes, port: int) -> None:
    ending = b"GET /late HTTP/1.1\r\n" + CLOSE + b"\r\n"
    answers = [await exchange(port, before + sent + ending) for before in (b"", b"", KNOWN, KNOWN * 2)]
    answers = [re.sub(rb"Date: [^\r]*", b"", answer) for answer in answers]
    assert answers[1] == answers[0]
    for answer in answers[2:]:
        assert answer.endswith(b"nothing here" + answers[0])


async def test_an_answer_in_parts_and_one_of_unknown_length(port: int) -> None:
    answer = body_of(await exchange(port, b"GET /large HTTP/1.1\r\n" + CLOSE + b"\r\n"))
    assert answer == bytes(3 << 20) + b"end"
    answer = await exchange(port, b"GET /stream HTTP/1.1\r\n" + CLOSE + b"\r\n")
    assert b"Transfer-Encoding: chunked\r\n" in answer
    assert body_of(answer) == b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"
    # HTTP/1.0 has no chunks: the end of the connection is the answer's end.
    answer = await exchange(port, b"GET /stream HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    assert b"chunked" not in answer
    assert body_of(answer) == b"onetwo"


async def test_connections_stay_or_close_as_the_client_says(port: int, connect: Connect) -> None:
    assert (await exchange(port, b"GET / HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.0 404 Not Found\r\n")
    reader, writer = await connect(port)
    for _ in range(2):
        writer.write(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert b"Connection: keep-alive\r\n" in await reader.readuntil(b"nothing here")
    writer.write(b"HEAD /echo HTTP/1.1\r\n" + CLOSE + b"\r\n")
    answer = await reader.read()
    assert b"Content-Length: 2\r\n" in answer
    assert b"Connection: close\r\n" in answer
    assert answer.endswith(b"\r\n\r\n")


async def test_a_body_that_nobody_reads_is_passed_over(port: int, connect: Connect) -> None:
    sent = b"POST /nowhere HTTP/1.1\r\nContent-Length: 3000000\r\n\r\n"
    reader, writer = await connect(port, sent)
    assert b" 404 " in await reader.readuntil(b"nothing here")
    writer.write(bytes(3_000_000) + POST + b"Content-Length: 1\r\n\r\n1")
    assert (await asyncio.wait_for(reader.readuntil(b"<1>"), PATIENCE_SECONDS)).startswith(b"HTTP/1.1 200 OK\r\n")
    # A client with a last request gets its answer, not a reset, even if it still sends.
    answer = await exchange(port, sent.replace(b"\r\n\r\n", b"\r\n" + CLOSE + b"\r\n"), bytes(3_000_000))
    assert body_of(answer) == b"nothing here"


@pytest.mark.long
async def test_the_rest_of_a_body_that_does_not_come_ends_the_connection(listen: Listen) -> None:
    port = await listen(HttpListener(handle, LOG, ConnectionLimits(head_seconds=0.3)))
    answer = await exchange(port, b"POST /nowhere HTTP/1.1\r\nContent-Length: 9\r\n\r\n123")
    assert body_of(answer) == b"nothing here"


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (b"\x16\x03\x01 hello\r\n\r\n", b"400 Bad Request: Invalid method"),
        (b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\n\r\n", b"URL is more than 8190 bytes"),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 9000 + b"\r\n\r\n", b"at most 128 headers of 8190 bytes"),
        (b"GET / HTTP/1.1\r\n" + b"X: 1\r\n" * 129 + b"\r\n", b"at most 128 headers of 8190 bytes"),
        (POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", b"400 Bad Request: "),
        (POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"400 Bad Request: "),
        (POST + b"Transfer-Encoding: chunked\r\n\r\nno number\r\n", b"Invalid character in chunk size"),
    ],
    ids=["no HTTP", "URL", "header", "headers", "lengths", "both lengths", "chunk"],
)
async def test_a_refusal_follows_the_answers_to_earlier_requests(sent: bytes, told: bytes, port: int) -> None:
    answer = await exchange(port, sent)
    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"Connection: close\r\n" in answer
    assert told in answer
    assert answer.count(b"HTTP/1.1 ") == 1
    answer = await exchange(port, b"GET /late HTTP/1.1\r\n\r\n" + sent)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert told in answer.partition(b"late")[2]
    answer = await exchange(port, (POST + b"Content-Length: 3\r\n\r\nhey") * 2 + sent)
    assert answer.count(b"<hey>") == 2
    assert told in answer.rpartition(b"<hey>")[2]


async def test_a_head_without_end_is_refused(port: int) -> None:
    parts = [b"GET / HTTP/1.1\r\nX: ", *[b"x" * 20_000] * 10]
    assert b"head is more than 131072 bytes" in await exchange(port, *parts)


CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "begin", [CHUNKED + b"1\r\nx\r\n0\r\nX: ", CHUNKED + b"1;x=", POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: "]
)
async def test_a_trailer_or_what_is_said_of_a_chunk_without_end_is_refused(begin: bytes, port: int) -> None:
    parts = [begin, *[b"x" * 20_000] * 10]
    assert b"trailer or chunk extension is more than 131072 bytes" in await exchange(port, *parts)


async def test_a_body_of_many_chunks_is_taken(port: int) -> None:
    chunks = b"1;%b\r\nx\r\n" % (b"y" * 60_000)
    answer = await exchange(port, POST + CLOSE + b"Transfer-Encoding: chunked\r\n\r\n", *[chunks] * 10, b"0\r\n\r\n")
    assert body_of(answer) == b"<xxxxxxxxxx>"


async def test_a_transfer_encoding_that_is_not_served_is_refused(port: int) -> None:
    answer = await exchange(port, POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"expected Transfer-Encoding chunked, got another" in answer


@pytest.mark.parametrize("origin", [b"http://x", b"HTTPS://user@x.example:8000"])
async def test_a_request_that_is_made_as_to_a_proxy_means_its_path(origin: bytes, port: int) -> None:
    answer = await exchange(port, POST.replace(b"/echo", origin + b"/echo?x") + CLOSE + b"Content-Length: 1\r\n\r\nx")
    assert body_of(answer) == b"<x>"


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_a_client_of_http_1_0_is_not_told_to_go_on(version: bytes, listen: Listen, connect: Connect) -> None:
    async def invite(request: Request) -> Response:
        request.send_continue()
        return await echo(request)

    port = await listen(HttpListener(lambda request: request.run(invite(request)), LOG))
    head = b"POST / HTTP/%b\r\nConnection: close\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\n" % version
    reader, writer = await connect(port, head)
    if version == b"1.1":
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(b"x")
    answer = await reader.read()
    assert answer.startswith(b"HTTP/%b 200 OK\r\n" % version)
    assert body_of(answer) == b"<x>"


async def test_a_client_that_expects_100_gets_it(port: int, connect: Connect) -> None:
    reader, _ = await connect(port, b"POST /nowhere HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n")
    # Not if nobody reads the body.
    assert (await reader.readuntil(b"nothing here")).startswith(b"HTTP/1.1 404")


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_client_that_goes_is_noticed(has_begun: bool, listen: Listen, connect: Connect) -> None:
    gone, asked = asyncio.Event(), asyncio.Event()

    async def wait(request: Request) -> None:
        if has_begun:
            request.begin_stream(200, "text/event-stream")
        asked.set()
        try:
            await asyncio.sleep(600)
        finally:
            gone.set()

    port = await listen(HttpListener(lambda request: request.run(wait(request)), LOG))
    reader, writer = await connect(port, KNOWN)
    await asyncio.wait_for(asked.wait(), PATIENCE_SECONDS)
    if has_begun:
        await reader.readuntil(b"\r\n\r\n")
    writer.close()
    await asyncio.wait_for(gone.wait(), PATIENCE_SECONDS)


@pytest.mark.parametrize("sent", [POST + b"Content-Length: 9\r\n\r\ncut", b"GET /wait HTTP/1.1\r\n\r\n"])
async def test_nothing_is_kept_of_a_client_that_goes(sent: bytes, listen: Listen, connect: Connect) -> None:
    requests: list[weakref.ref[Request]] = []

    def note(request: Request) -> None:
        requests.append(weakref.ref(request))
        request.run(echo(request) if request.head.method == "POST" else asyncio.sleep(60))

    port = await listen(HttpListener(note, LOG))
    _, writer = await connect(port)
    gc.disable()
    try:
        writer.write(sent)
        await until(lambda: requests)
        await asyncio.sleep(0.05)
        writer.close()
        await until(lambda: requests[0]() is None)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /never HTTP/1.1\r\n\r\n",
        b"GET /never HTTP/1.0\r\n\r\n",
        POST + b"Content-Length: 5\r\n\r\nhell",
        b"GET /never HT",
    ],
)
async def test_a_client_that_sends_no_more_counts_as_gone(sent: bytes, port: int, connect: Connect) -> None:
    reader, writer = await connect(port, sent)
    writer.write_eof()
    assert await asyncio.wait_for(reader.read(), PATIENCE_SECONDS) == b""


async def test_a_fault_of_the_server_is_status_500_or_ends_a_begun_answer(port: int) -> None:
    told = await exchange(port, b"GET /fails HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert told.startswith(b"HTTP/1.1 500 ")
    assert told.endswith(b"a fault of the server")
    broken = await exchange(port, b"GET /breaks HTTP/1.1\r\n\r\n")
    assert broken.endswith(b"5\r\nbegun\r\n")


async def test_one_connection_does_not_keep_the_others_waiting(port: int, connect: Connect) -> None:
    """Others have their turn among thousands of pipelined requests."""
    flood = b"GET / HTTP/1.1\r\n\r\n" * 10_000
    reader, writer = await connect(port)
    quiet = await connect(port)
    writer.write(flood)
    await asyncio.sleep(0.01)
    quiet[1].write(b"GET / HTTP/1.1\r\n\r\n")
    begun = b""
    answered = asyncio.ensure_future(quiet[0].readuntil(b"nothing here"))
    while not answered.done():
        begun += await reader.read(4096)
    assert begun.count(b"HTTP/1.1 404") < 9_000
