"""Fuzzes HTTP: mutated headers and bodies, JSON of wrong types, wrong sizes."""

from __future__ import annotations

import json
import random
import re
from typing import Any

from support.metrics import port_of
from support.server import RocserveProcess

from campaign import models
from campaign.action import Kind
from campaign.actions.fuzz_grpc import INNER_BY_TRITON, mutated
from campaign.requests import connected, exchange, json_body, read_all
from campaign.stage import Stage

REQUESTS_EACH = 30
PATHS = (
    "/v2",
    "/v2/health/live",
    "/v2/health/ready",
    "/v2/models/fuzzed",
    "/v2/models/fuzzed/config",
    "/v2/models/fuzzed/stats",
    "/v2/models/fuzzed/versions/1/ready",
    "/v2/models/fuzzed/versions/99999999999999999999/infer",
    "/v2/models/fuzzed/generate",
    "/v2/models/fuzzed/generate_stream",
    "/v2/models/..%2f..%2foutside/config",
    "/v2/models/%00/infer",
    "/v2/models/%ff%fe/infer",
    "/v2/repository/index",
    "/v2/systemsharedmemory/status",
    "/v2/trace/setting",
    "/v2/logging",
    "/v2/models",
    "/v2/hardware",
    "/v1/embeddings",
    "/v1/rerank",
    "/v2/rerank",
    "/v1/models",
    "/v1/models/%ff%fe",
    "/v1/nothing",
    "/nothing",
)
WRONG_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    1e400,
    2**70,
    "",
    "\x00",
    "\ud800",
    [],
    {},
    [[]],
    [[[[1]]]],
    {"a": {"b": []}},
    [None],
    ["x"] * 50,
)
TRITONS = re.compile(
    b"Unable to parse|failed to parse the request JSON buffer|failed to get request params|" + INNER_BY_TRITON.encode()
)
"""Texts of errors that Triton, too, answers with 500."""
STATUS_LINE = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
BINARY = "Inference-Header-Content-Length"


def http_request(verb: str, path: str, body: bytes, headers: dict[str, str]) -> bytes:
    lines = [f"{verb} {path} HTTP/1.1", "Host: campaign", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


def wrong_json(random: random.Random) -> bytes:
    """A good body with a value of another type somewhere, or with many brackets."""
    if random.random() < 0.1:
        return b"[" * random.randint(1, 200_000)
    body = json_body(models.FUZZED)
    place: Any = random.choice([body, body["inputs"][0]])
    key = random.choice([*place, "outputs", "parameters", "extra"])
    place[key] = random.choice(WRONG_VALUES)
    return json.dumps(body).encode()


def judge(stage: Stage, server: RocserveProcess, where: str, answer: bytes, sent: bytes) -> None:
    """Count the answer by its status. Findings: a traceback, a 500 that Triton would not give, and bytes that are not
    an answer of HTTP."""
    stage.canaries.search(where, answer)
    line = STATUS_LINE.match(answer)
    status = line[1].decode() if line else "no status line" if answer else "hung up"
    stage.tally.count(f"fuzz: {where}", status)
    if (status == "500" and not TRITONS.search(answer)) or status == "no status line" or b"Traceback" in answer:
        text = answer[-300:].decode(errors="replace")
        stage.findings.add("fuzz answered by a failure", f"{where}: {text!r} to {sent[:2000]!r}")


def bodies(stage: Stage, random: random.Random) -> None:
    server = random.choice((stage.poll, stage.explicit))
    path = f"/v2/models/{models.FUZZED}/infer"
    good = json.dumps(json_body(models.FUZZED)).encode()
    for _ in range(REQUESTS_EACH):
        body = random.choice((wrong_json(random), mutated(good, random), random.randbytes(random.randrange(200))))
        headers = {"Content-Length": str(len(body)), "Connection": "close"}
        if random.random() < 0.3:
            headers[BINARY] = random.choice(("0", "1", str(len(body)), str(len(body) + 1), "-1", "x", str(2**63)))
        if random.random() < 0.2:
            headers["Content-Encoding"] = random.choice(("gzip", "deflate", "br", "x"))
        sent = http_request("POST", path, body, headers)
        judge(stage, server, "HTTP bodies", exchange(server.http_port, sent), sent)


def heads(stage: Stage, random: random.Random) -> None:
    """Mutate headers for the HTTP port and the metrics port."""
    server = random.choice((stage.poll, stage.explicit))
    port = random.choice((server.http_port, port_of(server)))
    for _ in range(REQUESTS_EACH):
        verb = random.choice(("GET", "POST", "HEAD", "PUT", "OPTIONS", "CONNECT", "X" * 40))
        headers = {"Connection": "close", random.choice(("X-A", "Expect", "Upgrade", "Transfer-Encoding")): "chunked"}
        sent = http_request(verb, random.choice(PATHS), b"", headers)
        if random.random() < 0.5:
            sent = mutated(sent, random)
        judge(stage, server, "HTTP heads", exchange(port, sent), sent)


def wrong_sizes(stage: Stage, random: random.Random) -> None:
    """Send bodies shorter or longer than announced, chunks of wrong lengths, and pipelined requests."""
    server = random.choice((stage.poll, stage.explicit))
    path = f"/v2/models/{models.FUZZED}/infer"
    body = json.dumps(json_body(models.FUZZED)).encode()
    for _ in range(REQUESTS_EACH // 2):
        text = random.choice((0, 1, len(body) - 1, len(body) + 1, -1, 2**31, 2**64))
        chunked = {"Transfer-Encoding": "chunked"} if random.random() < 0.3 else {"Content-Length": str(text)}
        sent = http_request("POST", path, body, chunked) * random.randint(1, 3)
        judge(stage, server, "HTTP sizes", exchange(server.http_port, sent), sent)
    # One more client closes before its answer comes; the next one is answered.
    with connected(server.http_port) as opened:
        opened.sendall(http_request("POST", path, body, {"Content-Length": str(len(body))}))
    with connected(server.http_port) as opened:
        opened.sendall(http_request("GET", "/v2", b"", {"Connection": "close"}))
        judge(stage, server, "HTTP sizes", read_all(opened), b"")


KINDS = (
    Kind("fuzz-http.bodies", bodies),
    Kind("fuzz-http.heads", heads, 3),
    Kind("fuzz-http.sizes", wrong_sizes, 3),
)
