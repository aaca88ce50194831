"""Downloads from a real HTTP server on the loopback that misbehaves as servers do."""

from __future__ import annotations

import fcntl
import hashlib
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from support.waiting import PATIENCE_SECONDS

from rocserve_tools.get import download as get_download
from rocserve_tools.get.download import CATALOGUE, GetError, Patience, RemoteFile, download, opened_part

CONTENT = np.random.default_rng(7).integers(0, 256, 600_000, dtype=np.uint8).tobytes()
PATIENT = Patience(silence=PATIENCE_SECONDS, first_pause=0.01)
Answer = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """Answers each request with the next of the server's answers; the last one is repeated."""

    server: Server

    def do_GET(self) -> None:
        asked = self.server.asked
        asked.append((self.path, self.headers.get("Range")))
        answers = self.server.answers[self.path]
        (answers.pop(0) if len(answers) > 1 else answers[0])(self)

    def first_byte(self) -> int:
        return int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").removesuffix("-"))

    def head(self, status: int, length: int | None, **more: str) -> None:
        self.send_response(status)
        if length is not None:
            self.send_header("Content-Length", str(length))
        for name, value in more.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


class Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, list[Answer]] = {}
        self.asked: list[tuple[str, str | None]] = []

    def file(self, *paths: str) -> RemoteFile:
        addresses = tuple(f"http://127.0.0.1:{self.server_address[1]}{path}" for path in paths or ("/file",))
        return RemoteFile("file.bin", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), addresses)


class Notes:
    """Records the progress of a download."""

    def __init__(self) -> None:
        self.done: list[int] = []
        self.texts: list[str] = []

    def at(self, done: int) -> None:
        self.done.append(done)

    def note(self, text: str) -> None:
        self.texts.append(text)


def send(
    content: bytes = CONTENT, *, stop: int | None = None, length: int | None = None, ranges: bool = True
) -> Answer:
    """Send the content from the requested byte up to byte `stop`; `length`: the whole length in the header."""

    def answer(handler: Handler) -> None:
        first = handler.first_byte() if ranges else 0
        whole = len(content) if length is None else length
        if first:
            handler.head(206, whole - first, Content_Range=f"bytes {first}-{whole - 1}/{whole}")
        else:
            handler.head(200, whole)
        handler.wfile.write(content[first:stop])
        handler.close_connection = True

    return answer


def refuse(status: int) -> Answer:
    return lambda handler: handler.head(status, 0)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "1" / "model.onnx"


@pytest.fixture
def part(tmp_path: Path) -> Path:
    return tmp_path / "model.onnx.part"


def fetch(file: RemoteFile, target: Path, part: Path) -> Notes:
    notes = Notes()
    download(file, target, part, notes, PATIENT)
    assert target.read_bytes() == CONTENT
    assert not part.exists()
    return notes


def refusal(file: RemoteFile, target: Path, part: Path) -> str:
    with pytest.raises(GetError) as caught:
        download(file, target, part, Notes(), PATIENT)
    assert not target.parent.exists(), "a version folder without its model would be a broken version"
    return str(caught.value)


def lie(handler: Handler) -> None:
    """The header is right, but the bytes are those of the beginning, as from a cache that ignores ranges."""
    handler.head(206, len(CONTENT) - 1000, Content_Range=f"bytes 1000-{len(CONTENT) - 1}/{len(CONTENT)}")
    handler.wfile.write(CONTENT[:-1000])


@pytest.mark.parametrize(
    ("left", "answers", "asked"),
    [
        (b"", [send()], [None]),
        (b"", [send(stop=100_000), send(stop=350_000), send()], [None, "bytes=100000-", "bytes=350000-"]),
        (b"", [refuse(500), refuse(503), send()], [None] * 3),
        (CONTENT, [send()], []),
        (CONTENT + b"and more", [send()], [None]),
        (CONTENT[:250_000], [send()], ["bytes=250000-"]),
        (CONTENT[:1000], [refuse(416), send()], ["bytes=1000-", None]),
        (CONTENT[:1000], [lie, send()], ["bytes=1000-", None]),
        (b"x" * 1000, [send(), send()], ["bytes=1000-", None]),
        (b"x" * 1000, [send(ranges=False)], ["bytes=1000-"]),
    ],
    ids=[
        "whole",
        "broken-off",
        "faltering",
        "all-there",
        "too-much",
        "a-part",
        "no-range",
        "lie",
        "another-file",
        "no-ranges",
    ],
)
def test_a_file_comes_whole(
    server: Server, target: Path, part: Path, left: bytes, answers: list[Answer], asked: list[str | None]
) -> None:
    """`left`: what an earlier download left, which may be of another file."""
    if left:
        part.write_bytes(left)
    server.answers["/file"] = list(answers)
    notes = fetch(server.file(), target, part)
    assert [one for _, one in server.asked] == asked
    assert not asked or notes.done[-1] == len(CONTENT)


def partial(place: str) -> Answer:
    return lambda handler: handler.head(206, 10, Content_Range=place)


def endless(handler: Handler) -> None:
    handler.head(200, None)
    handler.wfile.write(CONTENT + b"more")
    handler.close_connection = True


SIZE = len(CONTENT)


@pytest.mark.parametrize(
    ("left", "answer", "message", "kept"),
    [
        (1000, partial(f"bytes 5-14/{SIZE}"), "asked for the bytes from 1000 on, it sends those from 5 on", 1000),
        (1000, partial("bytes 1000-1999"), "with the header Content-Range: 'bytes 1000-1999'", 1000),
        (1000, partial("pages 1-2/3"), "with the header Content-Range: 'pages 1-2/3'", 1000),
        (1000, partial("bytes */600000"), "with the header Content-Range: 'bytes */600000'", 1000),
        (1000, partial(""), "with the header Content-Range: ''", 1000),
        (1000, send(CONTENT + b"more"), f"the file there has {SIZE + 4} bytes, expected {SIZE}", 1000),
        (0, send(CONTENT[:-1]), f"the file there has {SIZE - 1} bytes, expected {SIZE}", 0),
        (0, send(CONTENT[:133]), f"the file there has 133 bytes, expected {SIZE}", 0),
        (0, send(CONTENT[:1000], length=SIZE), f"the connection ended after 1000 of {SIZE} bytes", 1000),
        (0, endless, f"more than the expected {SIZE} bytes", 0),
    ],
)
def test_what_is_not_the_file_is_refused_and_what_is_right_is_kept(
    server: Server, target: Path, part: Path, left: int, answer: Answer, message: str, kept: int
) -> None:
    if left:
        part.write_bytes(CONTENT[:left])
    server.answers["/file"] = [answer]
    assert message in refusal(server.file(), target, part)
    assert (part.read_bytes() if part.exists() else b"") == CONTENT[:kept]


def test_a_redirection_is_followed_to_the_rest(server: Server, target: Path, part: Path) -> None:
    part.write_bytes(CONTENT[:1000])
    server.answers = {"/moved": [lambda handler: handler.head(302, 0, Location="/file")], "/file": [send()]}
    fetch(server.file("/moved"), target, part)
    assert server.asked == [("/moved", "bytes=1000-"), ("/file", "bytes=1000-")]


def test_redirections_in_a_circle_are_left_in_one_line(server: Server, target: Path, part: Path) -> None:
    server.answers = {"/circle": [lambda handler: handler.head(302, 0, Location="/circle")]}
    text = refusal(server.file("/circle"), target, part)
    assert "HTTP status 302" in text
    assert len(text.splitlines()) == 3, text


@pytest.mark.parametrize("address", ["somewhere/file", "http://[::1/file", "http://local host/file"])
def test_what_is_no_address_is_said_at_once(target: Path, part: Path, address: str) -> None:
    file = RemoteFile("file.bin", 10, "0" * 64, (address,))
    assert f"{address}: it is not an address" in refusal(file, target, part)


@pytest.mark.parametrize("status", [404, 403])
def test_the_next_address_is_tried_where_the_first_has_nothing(
    server: Server, target: Path, part: Path, status: int
) -> None:
    server.answers = {"/gone": [refuse(status)], "/file": [send()]}
    notes = fetch(server.file("/gone", "/file"), target, part)
    assert [path for path, _ in server.asked] == ["/gone", "/file"]
    assert f"HTTP status {status}" in notes.texts[0]


def test_the_next_address_goes_on_where_the_first_broke_off(server: Server, target: Path, part: Path) -> None:
    server.answers = {"/weak": [send(stop=200_000), refuse(404)], "/file": [send()]}
    fetch(server.file("/weak", "/file"), target, part)
    assert server.asked[-1] == ("/file", "bytes=200000-")


def test_a_server_that_never_recovers_is_given_up(server: Server, target: Path, part: Path) -> None:
    server.answers["/file"] = [refuse(500)]
    text = refusal(server.file(), target, part)
    assert "HTTP status 500" in text
    assert "5 times in a row" in text
    assert "--source=URL names a mirror" in text
    assert len(server.asked) == 5
    assert not part.exists(), "nothing came, so nothing is left"


def test_wrong_bytes_are_never_kept(server: Server, target: Path, part: Path) -> None:
    wrong = CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])
    server.answers = {"/wrong": [send(wrong)]}
    text = refusal(server.file("/wrong"), target, part)
    assert hashlib.sha256(wrong).hexdigest() in text
    assert hashlib.sha256(CONTENT).hexdigest() in text
    assert not part.exists()
    server.answers = {"/wrong": [send(wrong)], "/file": [send()]}
    fetch(server.file("/wrong", "/file"), target, part)


def test_a_slow_server_is_waited_for(server: Server, target: Path, part: Path) -> None:
    def answer(handler: Handler) -> None:
        handler.head(200, len(CONTENT))
        for start in range(0, len(CONTENT), 100_000):
            handler.wfile.write(CONTENT[start : start + 100_000])
            handler.wfile.flush()
            time.sleep(0.02)

    server.answers["/file"] = [answer]
    fetch(server.file(), target, part)
    assert len(server.asked) == 1


def test_a_server_that_falls_silent_is_left(
    server: Server, target: Path, part: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine the server may be silent before its first byte, too.
    monkeypatch.setattr(get_download, "_ATTEMPTS", 1000)
    ended = threading.Event()

    def hang_after_the_beginning(handler: Handler) -> None:
        if handler.first_byte():
            send()(handler)
            return
        handler.head(200, len(CONTENT))
        handler.wfile.write(CONTENT[:1000])
        handler.wfile.flush()
        ended.wait(PATIENCE_SECONDS)

    server.answers["/file"] = [hang_after_the_beginning]
    download(server.file(), target, part, Notes(), Patience(silence=0.2, first_pause=0.0))
    ended.set()
    assert target.read_bytes() == CONTENT
    assert ("/file", "bytes=1000-") in server.asked


def test_nobody_listens(target: Path, part: Path) -> None:
    with socket.socket() as taken:
        # Bound, so that no other process takes the port, and does not listen.
        taken.bind(("127.0.0.1", 0))
        file = RemoteFile("file.bin", 10, "0" * 64, (f"http://127.0.0.1:{taken.getsockname()[1]}/file",))
        assert "no connection" in refusal(file, target, part)


def test_a_disk_without_room_is_said_before_anything_is_downloaded(server: Server, target: Path, part: Path) -> None:
    huge = RemoteFile("huge.bin", 1 << 60, "0" * 64, server.file().addresses)
    assert "make room" in refusal(huge, target, part)
    assert not part.exists()
    assert server.asked == []


def test_a_file_that_cannot_grow_any_more(server: Server, target: Path, part: Path) -> None:
    """A limit on the size of files replaces a full disk: the same call fails."""
    server.answers["/file"] = [send()]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
        text = refusal(server.file(), target, part)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert f"cannot write '{part}': File too large; run again" in text
    assert CONTENT.startswith(part.read_bytes())
    fetch(server.file(), target, part)


def test_a_part_that_just_got_its_name_is_not_written_to(
    target: Path, part: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may finish between opening and locking the part: the file is then the model's."""
    part.write_bytes(CONTENT)
    target.parent.mkdir()
    lock = fcntl.flock

    def lock_later(descriptor: int, operation: int) -> None:
        part.rename(target)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock_later)
    with pytest.raises(GetError, match="another process is writing"), opened_part(part):
        pass
    assert target.read_bytes() == CONTENT


def test_two_downloads_of_one_file_do_not_mix(server: Server, target: Path, part: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def answer(handler: Handler) -> None:
        begun.set()
        go_on.wait(PATIENCE_SECONDS)
        send()(handler)

    server.answers["/file"] = [answer]
    first = threading.Thread(target=download, args=(server.file(), target, part, Notes(), PATIENT))
    first.start()
    assert begun.wait(PATIENCE_SECONDS)
    with pytest.raises(GetError, match="another process is writing"):
        download(server.file(), target, part, Notes(), PATIENT)
    go_on.set()
    first.join()
    assert target.read_bytes() == CONTENT


def test_the_catalogue_has_addresses_and_whole_digests() -> None:
    for file in (one for model in CATALOGUE.values() for one in (*model.beside, model)):
        assert file.addresses
        assert all(address.startswith("https://") and address.endswith(file.name) for address in file.addresses)
        assert len(bytes.fromhex(file.sha256)) == 32
